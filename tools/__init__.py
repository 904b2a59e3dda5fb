"""Checks of the house itself; nothing here is installed with the package."""
