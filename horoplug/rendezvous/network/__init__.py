"""Sockets and hosts: addresses, interfaces, authentication, and which ranks share a host."""
