"""Neural networks that grow while they train, under a learned policy.

This module imports nothing, so `esper_lightning.growth` and the modules it needs work without Lightning, in any
training loop.
"""
