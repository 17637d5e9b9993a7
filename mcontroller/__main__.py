"""Run the command line: ``python -m mcontroller``."""

from __future__ import annotations

import sys

from mcontroller.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
