"""Who gets what? The controller: plans, dispatches, executes, collects. No model code."""
