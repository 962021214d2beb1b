"""Code that the bindings of all frameworks share: the engine of the process, the table of operations, process sets."""
