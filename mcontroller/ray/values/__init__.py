"""Values on their way between processes: serialized in messages, in Ray's object store, or kept where they are."""
