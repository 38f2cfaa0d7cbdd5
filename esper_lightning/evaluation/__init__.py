"""Controllers compared on the same hosts, with intervals."""
