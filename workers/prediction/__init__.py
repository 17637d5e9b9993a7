"""Time of a step of a layout on given hardware, from configurations alone."""
