"""Check functions that several test modules run, on the ranks of a job or on their results."""
