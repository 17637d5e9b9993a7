"""Where each rank holds which slice of a weight, and how weights move."""
