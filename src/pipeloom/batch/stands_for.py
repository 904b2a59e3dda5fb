"""A name that rooms agree on which may not import each other."""

STANDS_FOR = "_pipeloom_stands_for"
"""Where a module that stands for another one, a parent of several stages' units, has that."""
