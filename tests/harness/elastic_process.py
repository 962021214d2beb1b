"""What programs of elastic jobs share that have no framework. Each process knows its number, and prints whole lines."""

import os
import sys

ME = int(os.environ["HOROPLUG_ELASTIC_PROCESS"])


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()
