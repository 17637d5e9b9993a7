"""Programs and layouts that cannot be verified: one clear error each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_state.layout import ParallelLayout
from parallel_state.simulated import run_ranks
from parallel_state.verify import Program, Verifier, VerifyError
from parallel_state.verify.layouts import all_layouts, parse_layout
from parallel_state.verify.program import load_program
from tests.parallel_state.verify.programs import EXAMPLES, GPT, MOE, smaller

pytestmark = pytest.mark.simulated


def forward_step_that_raises(data_iterator: Any, model: Any) -> Any:
    raise KeyError("tokens")


@pytest.mark.parametrize(
    ("name", "function", "cause"),
    [
        ("config", lambda: None, TypeError),
        ("model_provider", lambda pre_process=True, post_process=True: None, TypeError),
        ("forward_step", lambda data_iterator: None, TypeError),
        ("forward_step", forward_step_that_raises, KeyError),
        ("batch", lambda: None, TypeError),
    ],
)
def test_an_error_of_a_function_of_the_program_is_the_cause(name: str, function: Any, cause: type[Exception]) -> None:
    with pytest.raises(VerifyError) as caught:
        Verifier(smaller(GPT, **{name: function}), steps=1)
    assert isinstance(caught.value.__cause__, cause)


def lengthened(index: int) -> Any:
    batch = GPT.batch(index)
    return batch | {"labels": torch.nn.functional.pad(batch["labels"], (0, 1))}


def doubled(index: int) -> Any:
    return {name: torch.cat([value, value]) for name, value in GPT.batch(index).items()}


@pytest.mark.parametrize(("batch", "name", "shape"), [(lengthened, "labels", (1, 17)), (doubled, "input_ids", (2, 16))])
def test_rows_of_another_shape_are_rejected(batch: Any, name: str, shape: tuple[int, int]) -> None:
    with pytest.raises(VerifyError) as caught:
        Verifier(smaller(GPT, batch=batch), steps=1)
    assert caught.value.fields == {"input": name, "shape": shape, "expected": (1, 16)}


def test_a_batch_that_ignores_context_parallelism_is_rejected() -> None:
    whole = {index: run_ranks(ParallelLayout(1), lambda index=index: GPT.batch(index))[0] for index in range(4)}
    with pytest.raises(VerifyError) as caught:
        Verifier(smaller(GPT, batch=whole.__getitem__), steps=1).verify("cp=2")
    assert (caught.value.fields["shape"], caught.value.fields["expected"]) == ((1, 16), (1, 8))


def changed_loss(change: Any) -> Program:
    def forward_step(data_iterator: Any, model: Any) -> Any:
        output, loss = GPT.forward_step(data_iterator, model)
        return output, lambda losses: change(*loss(losses))

    return smaller(GPT, forward_step=forward_step)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        (lambda total, count, report: (total.detach(), count, report), set()),
        (lambda total, count, report: (total * torch.nan, count, report), {"step", "name"}),
        (lambda total, count, report: (total, count, {"mean": total / 0}), {"step", "name"}),
    ],
)
def test_a_program_that_trains_nothing_or_is_not_finite_is_rejected(change: Any, fields: set[str]) -> None:
    with pytest.raises(VerifyError) as caught:
        Verifier(changed_loss(change), steps=1)
    assert set(caught.value.fields) == fields


@pytest.mark.parametrize(("text", "kind"), [("import no_such_package", ImportError), ("not valid python", SyntaxError)])
def test_a_file_that_cannot_be_imported_is_rejected(text: str, kind: type[Exception], tmp_path: Path) -> None:
    path = tmp_path / f"{tmp_path.name}.py"
    path.write_text(text)
    with pytest.raises(VerifyError) as caught:
        load_program(f"{path}:program")
    assert isinstance(caught.value.__cause__, kind)


def random_batch(index: int) -> Any:
    return GPT.batch(int(torch.randint(1000, (), generator=RUNS)))


def with_a_gate(*args: Any, **kwargs: Any) -> Any:
    """A weight that its module leaves out of ``sharded_state_dict``."""
    model = GPT.model_provider(*args, **kwargs)
    sharded = model.decoder.sharded_state_dict
    model.decoder.gate = torch.nn.Parameter(torch.ones(3))
    model.decoder.sharded_state_dict = lambda *a, **k: {
        key: value for key, value in sharded(*a, **k).items() if not key.endswith("gate")
    }
    return model


def config_of_one_process(**parallel: Any) -> Any:
    return GPT.config(params_dtype=torch.float32, pipeline_dtype=torch.float32)


def whole_model(config: Any, pre_process: bool, post_process: bool, vp_stage: Any = None) -> Any:
    return GPT.model_provider(dataclasses.replace(config, pipeline_model_parallel_size=1), True, True, vp_stage)


RUNS = torch.Generator().manual_seed(1)
REJECTED: dict[str, tuple[Program, str, dict[str, Any]]] = {
    "not deterministic": (smaller(GPT, batch=random_batch), "tp=2", {"name": "embedding.word_embeddings.weight"}),
    "dropout": (smaller(GPT, hidden_dropout=0.1), "tp=2", {"field": "hidden_dropout"}),
    "no global name": (smaller(GPT, model_provider=with_a_gate), "tp=2", {"key": "decoder.gate"}),
    "the config ignores the layout": (
        dataclasses.replace(GPT, config=config_of_one_process), "tp=2", {"field": "tensor_model_parallel_size"},
    ),
    "the provider ignores the layout": (smaller(GPT, model_provider=whole_model), "pp=2", {"layout": "pp=2"}),
    "micro-batches": (smaller(GPT), "dp=4", {"layout": "dp=4"}),
    "micro-batches of stages": (
        dataclasses.replace(GPT, micro_batches=2), "pp=2,vpp=2,dp=2", {"layout": "pp=2,vpp=2,dp=2"},
    ),
    "layers": (smaller(GPT), "pp=4", {"layout": "pp=4"}),
    "tokens": (smaller(GPT), "cp=16", {"layout": "cp=16"}),
    "heads": (smaller(GPT), "tp=8", {"layout": "tp=8"}),
}  # fmt: skip


@pytest.mark.parametrize(("program", "layout", "fields"), REJECTED.values(), ids=REJECTED)
def test_what_cannot_be_verified_is_an_error_with_its_fields(
    program: Program, layout: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(VerifyError) as caught:
        Verifier(program, steps=1).verify(layout)
    assert caught.value.fields == fields


@pytest.mark.parametrize("text", ["tp2", "tpp=2", "tp=two", "sp", "vpp=2", "tp=2,ep=3,dp=2", "tp=2,tp=4", "tp=2,sp,sp"])
def test_texts_that_are_no_layouts_are_rejected(text: str) -> None:
    with pytest.raises(VerifyError) as caught:
        parse_layout(text)
    assert caught.value.text == text


def test_a_layout_has_the_fewest_ranks_that_it_allows() -> None:
    expected = {"tp=2,pp=2": 4, "tp=2,ep=2": 4, "tp=2,ep=2,etp=1": 2, "tp=4,ep=6,etp=1": 12, "pp=8,ep=128": 1024}
    assert {text: parse_layout(text).layout.world_size for text in expected} == expected


def test_all_layouts_are_legal_and_no_larger_than_asked_for() -> None:
    texts = list(all_layouts(MOE.config(), 8))
    assert len(texts) == len(set(texts)) > 80
    assert {parse_layout(text).layout.world_size for text in texts} == {2, 4, 8}
    assert "tp=2,ep=2,etp=1,sp,distopt" not in texts  # one data-parallel rank
    assert {"tp=2,dp=2,ep=2,etp=1,sp,distopt", "pp=2,vpp=2", "cp=2,ep=2"} <= set(texts)


@pytest.mark.parametrize(
    ("reference", "fields"),
    [
        ("gpt", {"reference": "gpt"}),
        ("no_such_file.py:program", {"path": "no_such_file.py"}),
        ("no_such_module:program", {"module": "no_such_module"}),
        (f"{EXAMPLES / 'gpt.py'}:programme", {"reference": f"{EXAMPLES / 'gpt.py'}:programme"}),
    ],
)
def test_programs_that_do_not_exist_are_rejected(reference: str, fields: dict[str, Any]) -> None:
    with pytest.raises(VerifyError) as caught:
        load_program(reference)
    assert caught.value.fields == fields


def test_the_examples_import_each_other_by_file(tmp_path: Path) -> None:
    (tmp_path / "of_a_team.py").write_text("from gpt import program\n")
    assert load_program(f"{tmp_path / 'of_a_team.py'}:program") == GPT
