"""What can be said about a run, as numbers."""
