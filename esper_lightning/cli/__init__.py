"""Command line of Esper Lightning."""

PROGRAM = "esper-lightning"
