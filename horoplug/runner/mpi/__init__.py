"""Jobs whose ranks mpirun or jsrun starts."""
