"""The trace of a run: what every process did and when, in bounded files of the run's directory, and what it shows."""
