"""Tables that notebooks show: topology, pool, group, plan of a call, batch."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from mcontroller import DataProto, Dispatch, Worker, register
from mcontroller.ray.resource_pool import RayResourcePool
from mcontroller.testing import mock_worker_group
from parallel_state.layout import ParallelLayout
from parallel_state.topology import Topology
from tests.mcontroller.batches import numbered

LAYOUT = ParallelLayout(4, tp=2, pp=2)


class Model(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO)
    def compute(self, batch: DataProto) -> DataProto:
        return batch


class Cells(HTMLParser):
    """The texts of the tags of a page that contain text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "br":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self._open[-1], data))


def group_named(name: str) -> object:
    return mock_worker_group(Model, LAYOUT, name=name)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Topology.from_layout(LAYOUT), ["stage 0", "stage 1", "dp 0", "0-1", "2-3"]),
        (lambda: Topology.flat(3, names=["<b>"] * 3), ["3 ranks, no axes"]),
        (
            lambda: RayResourcePool([2], use_gpu=False, name_prefix="<b>"),
            ["pool <b>: 2 CPU bundle(s) x 1 slot(s), not reserved yet"],
        ),
        (lambda: group_named("<b>"), ["method", "dispatch mode", "compute", "DP_COMPUTE_PROTO"]),
        (lambda: group_named("<b>").compute.explain(numbered(4)), ["shard", "rows", "tp=1 pp=1", "3 (1 rows)"]),
        (
            lambda: DataProto.from_single_dict(dict(numbered(4).batch.items()), meta_info={"<b>": 1}),
            ["DataProto: 4 rows, 32 B", "n", "int64[4]", "meta_info", "<b>"],
        ),
    ],
    ids=["topology", "flat topology", "pool", "group", "plan", "batch"],
)
def test_notebooks_show_tables_with_escaped_texts(make: Callable[[], object], expected: list[str]) -> None:
    texts = Cells(make()._repr_html_()).texts
    assert [text for text in expected if text not in [data for _, data in texts]] == []
    assert {tag for tag, _ in texts} <= {"caption", "th", "td"}
