"""Checkpoints, in no framework's words: when to save, what is written beside the data, and how far the data is used."""
