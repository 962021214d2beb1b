"""The launcher: ``horovodrun -np 4 python train.py``, and ``horoplug.run(function, num_proc=4)``.

- Command line: ``launch`` is the command; ``arguments``, ``flags``, ``flag_values`` and ``config_file`` read what the
  user gives; ``checks`` finds mistakes before anything starts.
- Hosts: ``hosts`` and ``allocation`` decide which ranks run where, ``environment`` which variables they get.
- Running a job: ``job`` runs the ranks, ``job_description`` tells the agents what to start, ``signals`` handles the
  launcher's signals, ``blame`` finds the rank that failed first, ``output`` merges what ranks print, ``status`` formats
  the status line. ``agent`` is the process that owns the ranks of one host, ``agent_connection`` the launcher's
  connection to it, ``remote`` the ssh command that starts it.
- Before ranks start on several hosts: ``start``, ``preflight`` and ``probe`` check the network.
- ``mpirun`` and ``mpirun_launch`` let mpirun or jsrun start the ranks.
- ``run``, ``run_launcher``, ``run_task`` and ``exchange`` call functions on ranks.
- ``check_build`` and ``diagnostics`` print what ``--check-build`` shows."""
