"""Windows of profilers, and snapshots of device memory, of the workers that a run chooses."""
