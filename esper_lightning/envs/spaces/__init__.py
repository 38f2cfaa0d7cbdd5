"""Action spaces, action masks and observations of hosts."""
