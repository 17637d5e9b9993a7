"""The verb ``doctor``: what a cluster gets wrong before a run can start."""
