"""Move weights from one group of processes to another: scheduled once, run whenever the policy has changed."""
