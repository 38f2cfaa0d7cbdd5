"""Controllers that choose the actions for a pool of hosts."""
