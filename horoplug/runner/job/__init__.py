"""The loop of a job, and the two policies: a fixed size, and elastic."""
