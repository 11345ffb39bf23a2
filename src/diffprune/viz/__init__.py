"""Pictures of what a pruner does: kept tokens lit, scores as a heat map, and how alike the ends of a ranking are."""

from diffprune.viz.ends import compare_ends as compare_ends
from diffprune.viz.ends import end_similarity as end_similarity
from diffprune.viz.ends import save_matrix as save_matrix
from diffprune.viz.sheet import Panel as Panel
from diffprune.viz.sheet import draw as draw
from diffprune.viz.tokens import heat_map as heat_map
from diffprune.viz.tokens import light_up as light_up
