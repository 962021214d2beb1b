"""The launcher: ``horovodrun -np 4 python train.py``, and ``horoplug.run(function, num_proc=4)``.

- ``launch`` is the command, and ``run`` the function. ``command`` reads what the user gives, ``checks`` finds mistakes
  before anything starts, and ``hosts`` decides which ranks run where. ``environment`` and ``forwarding`` decide which
  variables they get.
- ``job`` runs a job: one loop, with a policy for jobs of a fixed size and one for elastic jobs, whose decisions are in
  ``elastic``. ``worker_job`` and ``elastic_worker_job`` are jobs whose processes Ray or Spark starts.
- ``start`` starts the agents: on this host, by ssh, or as tasks of a scheduler's step. ``agent`` is the process that
  owns the ranks of one host.
- ``network`` checks the network before ranks start on several hosts.
- ``output`` prints, and ``ending`` decides how a job ends.
- ``functions`` calls functions on ranks, and ``mpi`` lets mpirun or jsrun start them.
- ``diagnosis`` prints what ``--check-build`` shows."""
