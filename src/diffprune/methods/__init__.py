"""Pruning methods, one file each. `diffprune.methods.base` holds the interfaces."""
