"""Programs of users, which test_typing.py checks with mypy and pyright, and nothing runs. In those called wrong_*, both
have to report the lines that end with ``# wrong``, and no other one."""
