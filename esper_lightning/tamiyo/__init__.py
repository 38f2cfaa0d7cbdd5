"""Tamiyo, the policy that decides what to grow, and the baselines it is compared with."""
