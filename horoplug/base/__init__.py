"""Exceptions, logging and configuration: imported by every other package, imports none of them."""
