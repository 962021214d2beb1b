"""The launcher: ``horovodrun -np 4 python train.py``, and ``horoplug.run(function, num_proc=4)``.

- Command line: ``launch`` is the command; ``arguments``, ``flags``, ``flag_values`` and ``config_file`` read what the
  user gives; ``checks`` finds mistakes before anything starts.
- Hosts: ``hosts`` and ``allocation`` decide which ranks run where, ``environment`` which variables they get.
- Running a job: ``job`` is the event loop of a ``job_spec``, and ``static_policy`` and ``elastic_policy`` decide which
  agents and ranks are started. ``job_description`` describes the ranks to the agents. ``outcome`` decides how the job ends, and ``blame`` which rank failed first. ``console`` prints:
  ``output`` merges what ranks print, ``status`` formats the status line, ``outlet`` writes without blocking the event
  loop. ``signals`` installs the signal handlers.
- Agents: ``agent`` is the process that owns the ranks of one host, ``agent_connection`` the launcher's connection to
  it, ``agents`` all these connections, ``remote`` the ssh command that starts an agent. ``links`` has the ways to an
  agent, and ``spawn_tree`` decides which agents are started by others. ``starters`` and ``step``
  start them; the tasks of a scheduler's step are ``step_task``.
- Before ranks start on several hosts: ``network_check``, ``preflight`` and ``probe`` check the network.
- ``mpirun`` and ``mpirun_launch`` let mpirun or jsrun start the ranks.
- ``run``, ``run_launcher``, ``run_task`` and ``exchange`` call functions on ranks.
- ``check_build`` and ``diagnostics`` print what ``--check-build`` shows."""
