"""The launcher: ``horovodrun -np 4 python train.py``.

``launch`` is the command, ``arguments`` its flags, ``checks`` what is looked at before anything starts, ``environment``
what the ranks are told, ``job`` runs them, ``output`` merges what they print, ``agent`` is the process that owns the
ranks of one host, ``check_build`` the table of ``--check-build``."""
