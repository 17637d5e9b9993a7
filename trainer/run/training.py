"""A run from its configuration: its parts, its trainer, its Ray cluster, and how it ends."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType

import ray
from omegaconf import OmegaConf
from rich.console import Console

from mcontroller.cli.main import INTERRUPTED
from mcontroller.config.load import literal
from mcontroller.errors import ConfigError, DataError
from mcontroller.files import acquire_lock, check_writable, release_lock, replace_text
from mcontroller.output import Output
from mcontroller.trace.recorder import recording
from trainer.display import ProgressDisplay
from trainer.lifecycle import Callback, RunLifecycle
from trainer.loop import RayPPOTrainer
from trainer.run.config import CONFIG_FILE, REFERRED, RunConfig, tokenizer_files
from trainer.run.parts import RunParts, chosen_lines, make_parts, roles_of
from trainer.run.pools import pools_of
from trainer.run.recorded_rows import DATA, RecordedRows
from trainer.run.run_report import SUMMARY, RunReport
from trainer.saving.checkpoints import LOCK
from trainer.saving.preemption import PREEMPTED, Preempted, handling_signals
from trainer.saving.run_record import RECORD, read_record
from trainer.trackers import Run, make_trackers

CONNECT_S = 10.0
"""[s] Time to reach a cluster: Ray itself would try for two minutes, and print every attempt."""
_new_sessions = threading.Event()


def until_interrupted(action: Callable[[], object]) -> int:
    """Return the exit status: 0 after the action, 75 if it stopped after a step, 130 if it was interrupted at once.

    Output that cannot be written is dropped.
    """
    with handling_signals(_interrupt), redirect_stdout(Output(sys.stdout)), redirect_stderr(Output(sys.stderr)):
        try:
            action()
        except KeyboardInterrupt:
            sys.stdout.write("interrupted: all processes of the run have ended\n")
            return INTERRUPTED
        except Preempted as stopped:
            sys.stdout.write(f"{stopped.reason}: the run has ended\n")
            return PREEMPTED
    return 0


def train(config: RunConfig, console: Console) -> Path:
    """Run a configuration and return the run's directory.

    Everything that can be checked is checked before a process of a worker starts: files, prompts, and every reward
    function on problems of each kind.

    Raises:
        ConfigError: see ``make_parts``, or the directory, or that of the checkpoints, contains another run.
        DataError: see ``make_parts``, a reward function fails in the trial, another process runs in the directory, or
            the run is to be resumed and the record of its saves is missing.
    """
    directory = Path(config.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    config = config.within(directory)
    check_directories(directory, config)
    parts = make_parts(config)
    if config.trainer.epochs:  # for what shows or records the length of the run
        steps = parts.steps(config)
        config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, total_training_steps=steps))
    for line in (*parts.problem_lines(), *chosen_lines(config)):
        console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)
    try:
        for line in parts.try_rewards(config):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        acquire_lock(directory / LOCK, f"the run in {directory}")
        check_directories(directory, config)  # again: another process may have run in them before the lock
        if config.trainer.resume and not Path(config.trainer.default_local_dir, RECORD).exists():
            for name in ("metrics", "samples"):  # of the steps that are repeated
                (directory / f"{name}.jsonl").unlink(missing_ok=True)
            console.print("no step of the run is saved: it begins again")
            config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, resume=False))
        report = RunReport(directory, config, console)
        trainer = make_trainer(config, parts, directory, console)
        if not config.trainer.resume:
            Path(config.trainer.default_local_dir).mkdir(parents=True, exist_ok=True)
            write_config(directory, config)
        parts.tokenizer.save(directory)
        trainer.tokenizer_files = tokenizer_files(directory)
        report.begin()
        try:
            with recording(directory) if config.trainer.trace else nullcontext(), trainer:
                with trainer.stages("start"):
                    start_ray(config)
                trainer.init_workers()
                trainer.fit()
        except BaseException:
            report.end_early(trainer.global_steps)
            raise
    finally:
        with handling_signals(signal.SIG_IGN):  # while processes end, which takes seconds: some would be left
            parts.close()
            ray.shutdown()
            release_lock(directory / LOCK)
    report.end(trainer)
    return directory


def check_start(config: RunConfig, parts: RunParts) -> None:
    """Check what ``train`` checks after its parts are made: its directories, and that its trainer can be made.

    Raises:
        ConfigError: see ``train``.
        DataError: see ``train``.
    """
    directory = Path(config.run_dir or "runs/new").resolve()
    config = config.within(directory)
    check_directories(directory, config)
    make_trainer(dataclasses.replace(config, trackers=[]), parts, directory, Console(quiet=True))


def make_trainer(config: RunConfig, parts: RunParts, directory: Path, console: Console) -> RayPPOTrainer:
    """Return the trainer of a run; every role's group has a slot in each bundle of its pool.

    Args:
        config: the configuration of the run.
        parts: what it is made of.
        directory: the run's directory.
        console: where the run is shown.
    """
    return RayPPOTrainer(
        config=config,
        tokenizer=parts.tokenizer,
        role_worker_mapping=parts.roles,
        resource_pool_manager=pools_of(config, parts.roles),
        reward_fn=parts.rewards,
        train_dataset=parts.train,
        val_dataset=parts.val,
        evaluations=parts.evaluations,
        warm_up_dataset=parts.warm_up,
        combine_rewards=parts.combine,
        rollout_fn=parts.rollout_fn,
        stateful={DATA: RecordedRows(config, parts.prompts)},
        trackers=make_trackers(config.trackers, run_of_trackers(config, directory)),
        display=ProgressDisplay(console),
        callbacks=[_LoadedConfig(config, directory)],
    )


class _LoadedConfig(Callback):
    """Writes the configuration of a resumed run when its checkpoint is loaded: only what fits it is kept."""

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self._config, self._directory = config, directory

    def started(self, trainer: RunLifecycle) -> None:
        write_config(self._directory, self._config)


def write_config(directory: Path, config: RunConfig) -> None:
    """Write the configuration with which a run goes on into its directory, with the values in place of references."""
    content = {name: value for name, value in dataclasses.asdict(config).items() if name not in REFERRED}
    content["trainer"]["resume"] = False
    replace_text(directory / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(literal(content))))


def start_ray(config: RunConfig) -> None:
    """Connect to the cluster of the configuration, or start one on this machine for this run only."""
    cluster = config.cluster
    if cluster.address is not None:
        with _keeping_sigterm():
            connect_to(cluster.address)
        return
    with _children_in_new_sessions(), _keeping_sigterm():
        ray.init(
            address="local",
            num_cpus=cluster.num_cpus or pools_of(config, roles_of(config)).get_n_slots(),
            object_store_memory=cluster.object_store_memory,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )


def connect_to(address: str) -> None:
    """Connect to the cluster that runs at an address.

    Raises:
        ConfigError: there is none.
    """
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.rpartition("/")[2].strip("[]"), int(port)), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, OverflowError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"no Ray cluster answers at cluster.address={address}: {reason}. Start one with `ray start --head`; set "
            "RAY_AUTH_MODE=token if it said that it has token authentication; or leave the key out: the run then "
            "starts its own on this machine",
            key="cluster.address",
            value=address,
        ) from error


os.register_at_fork(after_in_child=lambda: os.setsid() if _new_sessions.is_set() else None)


@contextmanager
def _children_in_new_sessions() -> Iterator[None]:
    """Start the processes of Ray outside of this process group.

    A scheduler sends SIGTERM to the whole group: Ray would end before this process has saved the run with it.
    """
    _new_sessions.set()
    try:
        yield
    finally:
        _new_sessions.clear()


@contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray replaces in the main thread by one that aborts this process."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def run_of_trackers(config: RunConfig, directory: Path) -> Run:
    """Return what trackers are passed of a run: its names, its configuration, and the step that it is resumed at."""
    trainer = config.trainer
    resumed_at = read_record(Path(trainer.default_local_dir)).last.state.global_steps if trainer.resume else None
    name = config.experiment_name or directory.name
    return Run(directory, config.project_name, name, config=dataclasses.asdict(config), resumed_at=resumed_at)


def check_directories(directory: Path, config: RunConfig) -> None:
    """Check that the directories of a run can be written, and have no other run in them, or what it is to go on from.

    Raises:
        ConfigError: the run is a new one, and its directory contains another run, or its saves; or a directory cannot
            be written; or a resumed run has more steps than it is to have.
        DataError: the run is resumed and may have saves: there are some without a record, or no directory for them.
    """
    options, checkpoints = config.trainer, Path(config.trainer.default_local_dir)
    for key, path in {"run_dir": directory, "trainer.default_local_dir": checkpoints}.items():
        check_writable(path, key)
    text = f"the run in {directory} cannot be resumed: its directory of saves {checkpoints}"
    if not options.resume:
        _check_unused(directory, checkpoints)
    elif (checkpoints / RECORD).exists() or not (directory / CONFIG_FILE).exists():
        saved = read_record(checkpoints).last.state.global_steps
        if not options.epochs and saved > options.total_training_steps:
            raise ConfigError(
                f"trainer.total_training_steps is {options.total_training_steps}, and step {saved} of the run in "
                f"{directory} is saved: set it to {saved} or more",
                key="trainer.total_training_steps",
                value=options.total_training_steps,
            )
    elif saves := sorted(f"{save.parent.name}/{save.name}" for save in checkpoints.glob("*/global_step_*")):
        text += f" has {', '.join(saves)}, and no {RECORD}, which says which of them belong together: restore that file"
        raise DataError(text, path=str(checkpoints / RECORD), saves=saves)
    elif not checkpoints.is_dir():
        text += " does not exist, and a run creates it when it starts: pass trainer.default_local_dir=DIRECTORY with "
        text += "its place, mount its disk, or create an empty one to begin the run again"
        raise DataError(text, path=str(checkpoints / RECORD), saves=[])


def _check_unused(directory: Path, checkpoints: Path) -> None:
    if any((directory / name).exists() for name in ("metrics.jsonl", SUMMARY)):
        raise ConfigError(
            f"run_dir {directory} contains a run already: set another one, or resume it with mcontroller resume "
            f"{directory}",
            key="run_dir",
            value=str(directory),
        )
    if (checkpoints / RECORD).exists():
        raise ConfigError(
            f"trainer.default_local_dir {checkpoints} contains the saves of a run already, which this run would "
            "delete: set another one, or resume that run with mcontroller resume RUN_DIR",
            key="trainer.default_local_dir",
            value=str(checkpoints),
        )


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    """Handle a signal like Ctrl-C, even if the parent process made this one ignore SIGINT."""
    raise KeyboardInterrupt
