"""What every framework's binding shares: the process's engine, the table of operations, process sets, errors."""
