"""Builds engines from a checkpoint: `python build.py --help`."""

import sys

from builder.cli import main

if __name__ == "__main__":
    sys.exit(main())
