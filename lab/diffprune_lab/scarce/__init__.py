"""A second world, in which visual tokens are scarce: grounds as rich as the things on them, facts spread over tokens."""
