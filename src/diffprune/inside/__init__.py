"""Dropping tokens between the decoder layers of a language model: state, reader, budgets, the loop and generation."""
