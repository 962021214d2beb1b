"""The check of the network between hosts before ranks start."""
