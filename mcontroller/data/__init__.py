"""The batch: `DataProto`, its columns, how it is pickled and how it is saved to disk."""
