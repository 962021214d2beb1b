"""MPI, reached through mpi4py: its thread, its costs, and MPI as the transport between hosts."""
