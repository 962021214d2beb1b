"""Values of Spark DataFrames, for tests."""

from typing import Any

import numpy as np


def columns(frame: Any, *names: str) -> list[Any]:
    """The values of columns as arrays, in the order of the column ``id``. One Spark job."""
    rows = sorted(frame.select("id", *names).collect(), key=lambda row: row[0])
    found = []
    for number in range(1, len(names) + 1):
        values = [row[number] for row in rows]
        found.append(np.array([v.toArray() if hasattr(v, "toArray") else v for v in values]))
    return found
