"""Subcommands that the lab adds to `diffprune`; each file has a function `command`, as in the library."""
