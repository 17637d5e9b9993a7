"""PPO from one command: a small GPT learns arithmetic on real Megatron ranks in Ray worker processes.

python -m examples.ppo.main [layout=8] [seed=1] [key.of.a.field=value ...]

It is ``mcontroller train examples/ppo/config.yaml`` with the held-out accuracy at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from examples.ppo.report import write_report
from mcontroller.errors import MControllerError
from trainer.run.config import read_run_config
from trainer.run.training import train, until_interrupted

CONFIG = Path(__file__).with_name("config.yaml")


def main(arguments: Sequence[str], console: Console) -> int:
    """Run the example and return the exit status. No process of it is left, however it ends."""
    try:
        return until_interrupted(lambda: write_report(train(read_run_config(CONFIG, arguments), console), console))
    except MControllerError as error:
        console.print(f"[red]{type(error).__name__}[/red]: {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Console()))
