"""The command line, and the page about a run."""
