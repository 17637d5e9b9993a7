"""The verb ``port`` on verl 0.4.1's own Megatron workers: it misses no silent difference, and reports no other line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import verl

from mcontroller.cli.main import main
from mcontroller.porting.rules import RULES
from mcontroller.porting.scan import scan

ROOT = Path(verl.__file__).parent / "workers"
FILES = sorted(
    [*ROOT.glob("megatron_workers.py"), *ROOT.glob("*/megatron*.py"), *ROOT.glob("reward_model/megatron/*.py")]
)

# What each silent difference looks like in a line of these files, found without a syntax tree. A name that is a part of
# a batch is one that a loop or a method binds; these files call it mini_batch, micro_batch, batch, chunk, sub or part.
PART = r"\b(mini_batch|micro_batch|batch|chunk\w*|sub\w*|part\w*)"
PATTERNS = {
    "union": r"union_\w+_dict\(|^(?!\s*(\S+) = \1\.union\().*\.union\(",
    "metrics": r"meta_info(=\{|\[|\.get\(|\.pop\()[\"']metrics",
    "shared-meta-info": PART + r"\.meta_info(\[[^]]*\] = |\.update\()",
    "shared-columns": r"\.select\(\)|select\(non_tensor",
    "nested-lists": r"non_tensors=|from_dict\([^)=]+, ",
    "auto-padding": r"verl_auto_padding|VERL_AUTO_PADDING",
    "stages-as-shards": r"MEGATRON_PP_AS_DP",
    "one-per-stage": r"MEGATRON_PP_ONLY",
    "rank-zero-arguments": r"Execute\.RANK_ZERO",
    "device-index": r"cuda:\d|set_device\(\d|\.(cuda|to)\(\d|device\(.cuda., ?\d",
    "visible-devices": r"CUDA_VISIBLE_DEVICES|get_cuda_visible_devices",
    "port-number": r"get_master_addr_port\(",
    "errors": r"except .*(Error)",
    "colocate-count": r"RayResourcePool\(",
    "distributed": r"init_process_group\(|initialize_model_parallel\(|initialize_megatron\(",
}


def visible(path: Path) -> Iterator[tuple[int, str]]:
    """The lines and rules that the patterns find."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for rule, pattern in PATTERNS.items():
            if re.search(pattern, line.partition("#")[0]):
                yield number, rule


def test_every_silent_rule_has_a_pattern() -> None:
    assert set(PATTERNS) == {name for name, rule in RULES.items() if rule.kind == "silent"}


def test_no_silent_difference_is_missed_and_no_other_line_is_reported() -> None:
    assert len(FILES) >= 6
    reported = {(path.name, found.line, found.rule) for path in FILES for found in scan(path.read_text())}
    silent = {each for each in reported if RULES[each[2]].kind == "silent"}
    expected = {(path.name, *found) for path in FILES for found in visible(path)}
    assert silent == expected


def test_the_verb_lists_the_imports_and_the_constructors_that_must_change() -> None:
    found = scan((ROOT / "megatron_workers.py").read_text())
    assert sum(each.rule == "super-init" for each in found) == 3  # actor, critic and reward model
    assert sum(each.rule == "direct-rollout" for each in found) == 4
    replacements = [each.replacement for each in found if each.rule == "import"]
    assert "from mcontroller import DataProto" in replacements
    assert "from mcontroller import Dispatch; from mcontroller import register" in replacements
    assert "from workers import MegatronWorker" in replacements
    assert main(["port", *map(str, FILES)]) == 1
