"""Scores and what is left of them: the benchmarks' own metrics, and retention."""
