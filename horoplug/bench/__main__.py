"""``python -m horoplug.bench``."""

import sys

from horoplug.bench import main

if __name__ == "__main__":
    sys.exit(main())
