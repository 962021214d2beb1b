"""How processes that another launcher started agree on the rendezvous: over MPI or over TCP."""
