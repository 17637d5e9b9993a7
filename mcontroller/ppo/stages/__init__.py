"""The stages of a step: their seconds and memory, which run at the same time, and the devices that groups share."""
