"""Detection of diverged hosts, and the snapshots that restore them."""
