"""Command line of Esper Lightning."""
