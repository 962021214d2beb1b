"""How the ranks of a job find, authenticate and connect to each other.

``network``: addresses, interfaces, and the proof that both ends of a connection know the job's secret. ``store``: a
small key-value server, served by the launcher or by rank 0. ``bootstrap``: agreement on that server for processes that
another launcher has started. ``connections``: connects every rank with every other. ``session``: does all of this for
a :class:`horoplug.base.config.Config`."""
