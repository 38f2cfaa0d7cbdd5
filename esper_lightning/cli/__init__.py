"""Commands of the command line, the page about a run, and sweeps over settings."""
