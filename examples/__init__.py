"""Examples. Each runs by itself."""
