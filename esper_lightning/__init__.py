"""Grows neural networks while they train, under a learned policy.

Nothing is imported here: `esper_lightning.growth` and what it grows on work with any training loop, without Lightning.
"""
