"""Distributed checkpoints: saving, loading, their directories and manifests."""
