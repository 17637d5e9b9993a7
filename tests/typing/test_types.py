"""What a type checker sees: types of calls through groups, and mistakes that it must report."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
from mypy import api

from mcontroller import ClassWithInitArgs, ConfigError
from mcontroller.cli.stubs import add_arguments, run, typed_group
from tests.typing.roles import Critic

FOLDER = Path(__file__).parent
CONFIG = """
[mypy]
strict = true
explicit_package_bases = true
follow_imports = silent
disable_error_code = empty-body
[mypy-torch.*,ray.*,tensordict.*,numpy.*,transformers.*,megatron.*,rich.*,omegaconf.*]
follow_imports = skip
"""
EXPECTED = re.compile(r"^(?P<code>.*?)  # (?:error: )?(?P<expected>.*)$")
LONG_NAMES = re.compile(r"\b(?:mcontroller|tests)\.[\w.]*?(?=\b[A-Z]\w*\b)")


def mypy_report(files: list[Path], folder: Path) -> dict[tuple[str, int], str]:
    """Return what mypy --strict reports, by file and line, without notes that only explain an error."""
    (folder / "mypy.ini").write_text(CONFIG.replace("[mypy]", f"[mypy]\nmypy_path = {FOLDER.parents[1]}:{folder}", 1))
    options = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache")]
    output, errors, _ = api.run([*options, *map(str, files)])
    assert not errors, errors
    report: dict[tuple[str, int], str] = {}
    for line in output.splitlines()[:-1]:
        path, number, text = line.split(":", 2)
        report.setdefault((Path(path).name, int(number)), LONG_NAMES.sub("", text.strip()))
    return report


def expected_report(file: Path) -> dict[tuple[str, int], str]:
    lines = enumerate(file.read_text().splitlines(), start=1)
    return {(file.name, number): match["expected"] for number, line in lines if (match := EXPECTED.match(line))}


def assert_reports(report: dict[tuple[str, int], str], expected: dict[tuple[str, int], str]) -> None:
    assert sorted(report) == sorted(expected), report
    for place, text in expected.items():
        assert text in report[place], place


def test_mistakes_are_reported_and_nothing_else(tmp_path: Path) -> None:
    file = FOLDER / "mistakes.py"
    assert_reports(mypy_report([file], tmp_path), expected_report(file))


USE_OF_TYPED_GROUP = """
from mcontroller import DataProto, RayClassWithInitArgs, RayResourcePool
from tests.typing.roles import Critic
from critic_group import CriticGroup
critic = CriticGroup(RayResourcePool([2], use_gpu=False), RayClassWithInitArgs(Critic, {}))
batch = DataProto()
reveal_type(critic.compute_values(batch=critic.update(batch), scale=2))  # DataProto
reveal_type(critic.compute_values.options(blocking=False)(batch))  # DataProto
reveal_type(critic.update.options(blocking=True)(batch))  # DataProto
reveal_type(critic.save.explain("path", step=3))  # Explanation
reveal_type(critic.save("path"))  # list[int]
reveal_type(critic.export("path"))  # list[int]
reveal_type(critic.later(3))  # list[str]
reveal_type(critic.where())  # Future[str]
reveal_type(critic.each([1, 2]))  # list[str]
reveal_type(critic.stage(1))  # list[str]
reveal_type(critic.shards([1, 2]))  # list[str]
reveal_type(critic.where.options(blocking=True)())  # str
reveal_type(critic.execute_all("helper"))  # Future[list[Any]]
reveal_type(critic.get_megatron_rank_info(0).tp_rank)  # int
reveal_type(critic.anything)  # GroupMethod[..., Any, Any]
reveal_type(critic.custom([1, 2]))  # Any
critic.save(3)  # error: Argument 1 to "__call__" of "GroupMethod" has incompatible type "int"; expected "str"
critic.each(3)  # error: has incompatible type "int"; expected "Sequence[int]"
critic.compute_values(batch, factr=2)  # error: Unexpected keyword argument "factr"
critic.save.explain()  # error: Missing positional argument "path"
critic.compute_values.options(paddin="none")  # error: Unexpected keyword argument "paddin"
critic.compute_values.options(blocking=False)(batch).bach  # error: "DataProto" has no attribute "bach"
"""


NAMED_AS_A_CLASS = """
from mcontroller import Dispatch, Worker, register
class Value: ...
class Model(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def get(self, *numbers: int, **more: Value) -> None: ...
"""


def test_a_generated_group_class_has_the_types_of_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    written, other, use = tmp_path / "critic_group.py", tmp_path / "other_group.py", tmp_path / "use.py"
    (tmp_path / "Named").mkdir()
    (tmp_path / "Named/models.py").write_text(NAMED_AS_A_CLASS)
    monkeypatch.syspath_prepend(str(tmp_path))
    for worker, file in (("tests.typing.roles:Critic", written), ("Named.models:Model", other)):
        options = ["-o", str(file), "--group", "mcontroller:RayWorkerGroup"]
        assert run(parser.parse_args([worker, *options])) == 0
    use.write_text(USE_OF_TYPED_GROUP)
    assert_reports(mypy_report([written, other, use], tmp_path), expected_report(use))


def test_a_generated_group_class_is_an_ordinary_group_at_run_time() -> None:
    names: dict[str, object] = {}
    exec(typed_group(Critic, "mcontroller:LocalWorkerGroup"), names)
    group: Any = names["CriticGroup"]
    assert group(ClassWithInitArgs(Critic, {}), 2).save("path") == [None, None]


@pytest.mark.parametrize(
    "worker",
    ["tests.typing.roles", "tests.typing.roles:Nothing", "tests.typing.roles:STAGES", f"{FOLDER}/roles.py:Critic"],
)
def test_what_cannot_be_typed_is_rejected(worker: str) -> None:
    with pytest.raises(ConfigError) as raised:
        run(argparse.Namespace(worker=worker, output=None, group=None))
    assert raised.value.key == "worker"
