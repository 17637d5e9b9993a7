"""Dispatch modes, and what a call sends to and collects from each rank."""
