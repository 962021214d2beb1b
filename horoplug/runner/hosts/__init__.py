"""The hosts that users name, and which ranks they get."""
