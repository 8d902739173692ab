"""A training run, from its configuration to the files that it leaves."""
