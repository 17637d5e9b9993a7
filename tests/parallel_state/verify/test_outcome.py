"""The lines of an outcome."""

from __future__ import annotations

from parallel_state.verify.outcome import DifferingModule, Outcome


def test_modules_of_one_kind_are_one_line_with_the_first_operations() -> None:
    operations = [f"Op{number} at file.py:{number}" for number in range(9)]
    experts = [f"layers.1.experts.{index}.fc1 (Linear, a.py:3): {', '.join(operations)}" for index in range(4)]
    router = "layers.1.router (TopKRouter, r.py:2): MoEAuxLossAutoScaler at m.py:1 in backward, Mul"
    place = DifferingModule("backward", "norm", "Norm, n.py:1", 0, 1, 0, {}, 0.5, computed_by=(router, *experts))
    *_, first, second, hint, _ = "\n".join(Outcome("ep=2", 2, place=place).lines()).splitlines()
    assert first == f"computed by {router}"
    assert second.strip() == f"{experts[0].partition(':')[0]}:3) and 3 more: {', '.join(operations[:3])}, ..."
    assert "docs/verify.md#gallery" in hint
    plain = DifferingModule("backward", "norm", "Norm, n.py:1", 0, 1, 0, {}, 0.5, computed_by=tuple(experts))
    assert "gallery" not in "\n".join(Outcome("ep=2", 2, place=plain).lines())
