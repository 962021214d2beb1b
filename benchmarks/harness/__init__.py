"""Code that all benchmarks share: starting ranks, the compared libraries, timing, the machine, and the record."""
