"""`python -m diffprune` is `diffprune`."""

from diffprune.cli.main import main

main()
