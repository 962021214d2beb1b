"""The command line: flags, configuration file, and the jobs that they describe."""
