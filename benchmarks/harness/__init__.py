"""What all benchmarks share: starting ranks, the libraries to compare with, the clock, the machine, and the record."""
