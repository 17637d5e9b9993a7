"""Run the checks: ``python -m workers.gpucheck``."""

from __future__ import annotations

import argparse
import sys

from mcontroller.errors import MControllerError
from workers.gpucheck import verb


def _main() -> int:
    """Read the command line, run the checks and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.gpucheck",
        description=verb.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_arguments(parser)
    try:
        return verb.run(parser.parse_args())
    except MControllerError as error:
        sys.stderr.write(f"gpucheck: {type(error).__name__}: {error}\n")
        return verb.UNUSABLE


if __name__ == "__main__":
    sys.exit(_main())
