"""How the ranks of a job find and authenticate each other.

``auth``: proves that both ends of a connection know the job's secret. ``store``: a small key-value server, served by
the launcher or by rank 0. ``mesh``: connects every rank with every other. ``session``: all of it from a Config."""
