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
LONG_NAMES = re.compile(r"\b(?:mcontroller|revealed|tests)\.[\w.]*?(?=\b[A-Z]\w*\b)")


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[str]]:
    """What mypy reports about the two files, by file and line."""
    files = [FOLDER / "revealed.py", FOLDER / "mistakes.py"]
    return report_of(files, tmp_path_factory.mktemp("mypy"), "plugins = mcontroller.mypy_plugin")


def report_of(files: list[Path], folder: Path, *settings: str) -> dict[tuple[str, int], list[str]]:
    path = ":".join([str(FOLDER.parents[1]), str(folder)])
    (folder / "mypy.ini").write_text(
        CONFIG.replace("[mypy]", "\n".join(["[mypy]", f"mypy_path = {path}", *settings]), 1)
    )
    options = ["--config-file", str(folder / "mypy.ini"), "--cache-dir", str(folder / "cache")]
    output, errors, _ = api.run([*options, *map(str, files)])
    assert not errors, errors
    found: dict[tuple[str, int], list[str]] = {}
    for line in output.splitlines()[:-1]:
        path, number, text = line.split(":", 2)
        found.setdefault((Path(path).name, int(number)), []).append(text.strip())
    return found


def expectations(name: str) -> dict[int, str]:
    return expected_in((FOLDER / name).read_text())


def expected_in(text: str) -> dict[int, str]:
    lines = enumerate(text.splitlines(), start=1)
    return {number: match["expected"] for number, line in lines if (match := EXPECTED.match(line))}


def test_types_of_groups_calls_options_and_futures_are_known(reported: dict[tuple[str, int], list[str]]) -> None:
    expected = expectations("revealed.py")
    assert len(expected) > 30
    found = {number: texts for (name, number), texts in reported.items() if name == "revealed.py"}
    shown = {number: LONG_NAMES.sub("", " and ".join(texts)) for number, texts in found.items()}
    assert shown == {number: f'note: Revealed type is "{text}"' for number, text in expected.items()}


def test_mistakes_are_reported_and_nothing_else(reported: dict[tuple[str, int], list[str]]) -> None:
    expected = expectations("mistakes.py")
    assert len(expected) > 25
    found = {
        number: " and ".join(text for text in texts if not text.startswith("note: "))
        for (name, number), texts in reported.items()
        if name == "mistakes.py"
    }
    assert sorted(found) == sorted(expected)
    for number, text in expected.items():
        assert text in found[number], f"line {number}: {found[number]}"


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
reveal_type(critic.shards([1, 2]))  # list[str]
reveal_type(critic.custom([1, 2]))  # Any
critic.save(3)  # error: Argument 1 to "__call__" of "GroupMethod" has incompatible type "int"; expected "str"
"""


def test_a_generated_group_class_has_the_same_types_without_the_plugin(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    written, use = tmp_path / "critic_group.py", tmp_path / "use.py"
    group = "mcontroller:RayWorkerGroup"
    assert run(parser.parse_args(["tests.typing.roles:Critic", "-o", str(written), "--group", group])) == 0
    use.write_text(USE_OF_TYPED_GROUP)
    reports = report_of([written, use], tmp_path)
    assert {place: texts for place, texts in reports.items() if place[0] != "use.py"} == {}
    shown = {number: LONG_NAMES.sub("", texts[0]) for (_, number), texts in reports.items()}
    expected = expected_in(USE_OF_TYPED_GROUP)
    assert sorted(shown) == sorted(expected)
    assert all(text in shown[number] for number, text in expected.items()), shown


def test_a_generated_group_class_is_an_ordinary_group_at_run_time() -> None:
    names: dict[str, object] = {}
    exec(typed_group(Critic, "mcontroller:LocalWorkerGroup"), names)
    group: Any = names["CriticGroup"]
    assert group(ClassWithInitArgs(Critic, {}), 2).save("path") == [None, None]


@pytest.mark.parametrize(
    ("worker", "message"),
    [
        ("tests.typing.roles", "worker is 'tests.typing.roles'; expected package.module:name"),
        ("tests.typing.roles:Nothing", "tests.typing.roles has no 'Nothing'"),
        ("tests.typing.roles:STAGES", "which is a DispatchSpec; expected a class"),
    ],
)
def test_what_cannot_be_typed_is_rejected(worker: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(argparse.Namespace(worker=worker, output=None, group=None))
