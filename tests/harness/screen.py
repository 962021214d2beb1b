"""A replacement for standard output."""


class Screen:
    """Collects the written text. Acts as a terminal or as a file."""

    def __init__(self, terminal, columns=0):
        self.terminal = terminal
        self.columns = columns
        self.data = b""

    def write(self, data):
        self.data += data
