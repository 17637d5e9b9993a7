"""Move weights from one group of processes to another: planned once, run whenever the policy has changed."""
