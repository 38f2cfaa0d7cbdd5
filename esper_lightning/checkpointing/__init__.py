"""Validation, atomic writing and resizing of checkpoints."""
