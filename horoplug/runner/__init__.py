"""The launcher: ``horovodrun -np 4 python train.py``.

``launch`` is the command, ``arguments`` its flags, ``checks`` what is looked at before anything starts, ``hosts`` says
which ranks run where and ``environment`` what they are told. ``job`` runs them, ``blame`` finds out which one failed
first, ``output`` merges what they print. ``agent`` is the process that owns the ranks of one host, ``link`` the
launcher's end of it, ``remote`` the way to another host. ``start``, ``preflight`` and ``probe`` are what happens before
ranks begin on several hosts. ``check_build`` is the table of ``--check-build``."""
