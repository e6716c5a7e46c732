"""Checkpoints: what is the same for every framework."""
