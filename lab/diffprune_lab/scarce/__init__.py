"""A second world, in which visual tokens are scarce: rich grounds, and facts that are spread over tokens."""

NAME = "scarce-llava"  # of the model that knows this world
