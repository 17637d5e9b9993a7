"""The display never ends a run: output that is closed, full or ascii, markup in texts, and displays that fail."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import pytest
from rich.console import Console

from mcontroller.cli.main import main
from mcontroller.output import Output, OutputError
from tests.trainer.toy import toy_config, toy_trainer
from trainer import Display, ProgressDisplay
from trainer.run.training import until_interrupted


def closed_pipe() -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def full_disk() -> TextIO:
    return open("/dev/full", "w")


def ascii_file() -> TextIO:
    return open(os.devnull, "w", encoding="ascii")


def closed_file() -> TextIO:
    file = open(os.devnull, "w")  # noqa: SIM115
    file.close()
    return file


OUTPUTS = [closed_pipe, full_disk, ascii_file, closed_file]
MARKUP = "no rank can read [/data/x] :warning: ∑"


def trained(directory: Path, display: Display, **others: Any) -> int:
    with toy_trainer(toy_config(2, default_local_dir=str(directory)), display=display, **others) as trainer:
        trainer.show(trainer.display.starting, MARKUP)
        trainer.init_workers()
        trainer.show(trainer.display.samples, [{"prompt": MARKUP, "response": MARKUP, "score": 1.0}])
        trainer.show(trainer.display.held_out, 0, {f"held_out/{MARKUP}": 1.0})
        trainer.fit()
    return trainer.global_steps


@pytest.mark.parametrize("make_output", OUTPUTS)
@pytest.mark.parametrize("console", ["of the verbs", "of a program", "default"])
def test_a_run_goes_on_without_its_output(
    make_output: Callable[[], TextIO],
    console: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "stdout", output := make_output())
    steps: list[int] = []
    makers: Mapping[str, Callable[[], ProgressDisplay]] = {
        "of the verbs": lambda: ProgressDisplay(Console()),
        "of a program": lambda: ProgressDisplay(Console(file=output)),
        "default": ProgressDisplay,
    }

    def run() -> None:
        steps.append(trained(tmp_path, makers[console]()))

    with caplog.at_level(logging.WARNING):
        if console == "of the verbs":
            assert until_interrupted(run) == 0
        else:
            run()
    assert steps == [2]
    assert len(caplog.messages) <= 3  # one of each writer
    if not output.closed and console != "of a program":
        output.flush()  # as the interpreter does at its end


def test_texts_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Messages, names of metrics, samples and phases are no markup, and no names of emoji."""
    display = ProgressDisplay()
    assert trained(tmp_path, display) == 2
    display.phase(MARKUP, 1)
    display.step({"train/score": 0.5})
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{MARKUP} ..." in shown and "[/data/x] :warning: ∑ (1)" in shown and f"{MARKUP} 1/1 reward 0.500" in shown
    assert "x] :warning: ∑ 1.000" in shown  # the name of a metric begins after its last slash


def test_a_display_that_raises_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Display):
        closed = 0

        def step(self, metrics: Mapping[str, float]) -> None:
            raise ZeroDivisionError("of a program")

        def close(self) -> None:
            self.closed += 1

    with caplog.at_level(logging.WARNING):
        assert trained(tmp_path, failing := Failing()) == 2
    assert [message for message in caplog.messages if "ZeroDivisionError: of a program" in message] == [
        "the display has failed, and shows nothing more: ZeroDivisionError: of a program"
    ]
    assert failing.closed == 1


def test_characters_that_an_encoding_lacks_are_escapes(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w", encoding="ascii") as file:
        output = Output(file)
        output.write("∑ of é\n")
    assert (tmp_path / "log").read_text() == "\\u2211 of \\xe9\n" and output.encoding == "ascii"


def test_a_verb_whose_reader_has_ended_succeeds_and_one_on_a_full_disk_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = ["topology", "--world-size", "4", "--tp", "2"]
    monkeypatch.setattr(sys, "stdout", closed_pipe())
    assert main(verb) == 0
    monkeypatch.setattr(sys, "stdout", full_disk())
    assert main(verb) == 1
    assert "mcontroller topology: OutputError: the output cannot be written: [Errno 28]" in capsys.readouterr().err
    with pytest.raises(OutputError) as caught:
        print("text", file=Output(closed_pipe(), required=True), flush=True)
    assert isinstance(caught.value.__cause__, BrokenPipeError)
