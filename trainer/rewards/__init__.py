"""The scores of responses: reward functions of a program or of a configuration, and the processes that call them."""
