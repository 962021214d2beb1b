"""The launcher: ``horovodrun -np 4 python train.py``, and ``horoplug.run(function, num_proc=4)``.

``launch`` is the command, ``arguments``, ``flags`` and ``config_file`` are what it is told, ``checks``,
``preflight`` and ``probe`` what is looked at before anything starts, ``environment`` what the ranks are told,
``hosts`` and ``allocation`` where they run. ``job`` runs them, through an ``agent`` on each host, which a ``link``
connects; ``output`` merges what they print, ``status`` makes the line below it, ``blame`` finds the first that
failed. ``mpi`` and ``mpi_launch`` have mpirun do it. ``run``, ``run_launcher``, ``run_task`` and ``exchange`` call
functions. ``check_build`` and ``circumstances`` are the tables of ``--check-build``."""
