"""Functions that are called on ranks, and their results."""
