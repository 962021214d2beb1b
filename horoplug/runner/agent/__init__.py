"""The process that owns the ranks of one host, and the ways by which its bytes travel."""
