"""Lightning data modules, which own the environments of a run."""
