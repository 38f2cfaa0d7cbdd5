"""Modules on which all other subpackages build: devices and processes, files, registered names, terminal output."""
