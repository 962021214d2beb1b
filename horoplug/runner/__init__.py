"""The launcher: ``horovodrun -np 4 python train.py``, and ``horoplug.run(function, num_proc=4)``.

``launch`` is the command; ``arguments``, ``flags`` and ``config_file`` are what it is told. ``checks`` is what is
looked at before anything starts; ``hosts`` and ``allocation`` say which ranks run where, ``environment`` what they
are told. ``job`` runs them, ``blame`` finds out which one failed first, ``output`` merges what they print and
``status`` makes the line below it. ``agent`` is the process that owns the ranks of one host, ``link`` the launcher's
end of it, ``remote`` the way to another host; ``start``, ``preflight`` and ``probe`` are what happens before ranks
begin on several hosts.

``mpi`` and ``mpi_launch`` have mpirun start the ranks. ``run``, ``run_launcher``, ``run_task`` and ``exchange`` call
functions. ``check_build`` and ``circumstances`` are the tables of ``--check-build``."""
