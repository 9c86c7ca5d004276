"""`python -m engine_runtime`."""

import sys

from engine_runtime.cli import main

if __name__ == "__main__":
    sys.exit(main())
