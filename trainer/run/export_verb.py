"""Write the actor of a run as a Hugging Face directory, with its tokenizer, or its adapter in PEFT's format.

examples: mcontroller export runs/20260101-120000 --hf model
          mcontroller export runs/20260101-120000 --hf model --tp 2
          mcontroller export runs/20260101-120000 --hf adapter --adapter
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mcontroller.errors import ConfigError
from mcontroller.files import check_new_directory
from trainer.run.config import tokenizer_files
from trainer.run.convert_verb import add_layout_arguments, on_workers
from trainer.run.resume_verb import config_of_run

if TYPE_CHECKING:
    from mcontroller.group import WorkerGroup


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("directory", metavar="RUN_DIR", help="the directory of the run")
    parser.add_argument("--hf", metavar="DIR", required=True, help="the directory to write, which is new or empty")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--merged", action="store_true", help="the model with its adapter merged; the default")
    what.add_argument("--adapter", action="store_true", help="only the adapter of a run with model.lora")
    add_layout_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the last whole checkpoint of the actor, and return the exit status."""
    check_new_directory(arguments.hf)
    config = config_of_run(arguments.directory, [])
    model = config.actor_rollout_ref.model
    if model.lora is None and (arguments.adapter or arguments.merged):
        text = f"{arguments.directory} has no adapter: actor_rollout_ref.model.lora is not set; leave the option out"
        raise ConfigError(text, key="--adapter" if arguments.adapter else "--merged")
    target = str(Path(arguments.hf).resolve())
    tokenizer = tokenizer_files(Path(arguments.directory).resolve())
    from trainer.saving.checkpoints import newest_whole_save  # with torch
    from trainer.saving.run_record import read_record

    checkpoints = Path(config.trainer.default_local_dir)
    record = read_record(checkpoints)
    steps: list[int] = []

    def export(group: WorkerGroup) -> None:
        chosen = newest_whole_save(checkpoints, record, {"actor": group}, with_batches=False)
        for step, damage in chosen.damaged.items():
            sys.stdout.write(f"the checkpoint of step {step} is damaged ({damage})\n")
        group.load_checkpoint(chosen.paths["actor"])
        steps.append(chosen.save.state.global_steps)
        if arguments.adapter:
            group.export_adapter(target)
        else:
            group.export_hf(target, tokenizer)

    on_workers(model, arguments, export)
    sys.stdout.write(f"step {steps[0]} of {arguments.directory} is in {target}\n")
    return 0
