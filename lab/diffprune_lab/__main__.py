"""`python -m diffprune_lab`: the command line with the lab joined, whether it is installed or only on the path."""

import diffprune_lab
from diffprune.cli.main import main

diffprune_lab.join()
main()
