"""Tamiyo, who decides what to grow, and the rules she is compared with."""
