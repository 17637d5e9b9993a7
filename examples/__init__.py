"""Examples, each of which runs by itself."""
