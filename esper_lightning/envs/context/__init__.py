"""Contexts of hosts, their distribution, and the factory of their environments."""
