"""How the processes of an elastic job and its launcher agree who forms the job, and when."""
