"""Fused executor: N hosts run as one network of batched layers."""
