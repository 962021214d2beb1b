"""How a job ends: who has failed first, the exit code, the results by rank."""
