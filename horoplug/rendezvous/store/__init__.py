"""The key-value store through which ranks exchange addresses: server, client and wire protocol."""
