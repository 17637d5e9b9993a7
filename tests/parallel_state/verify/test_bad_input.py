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


def rejected(program: Program, layout: str = "tp=2") -> str:
    with pytest.raises(VerifyError) as caught:
        Verifier(program, steps=1).verify(layout)
    return str(caught.value)


def test_batches_that_differ_from_run_to_run_are_rejected() -> None:
    runs = torch.Generator().manual_seed(1)

    def batch(index: int) -> Any:
        return GPT.batch(int(torch.randint(1000, (), generator=runs)))

    message = rejected(smaller(GPT, batch=batch))
    assert message.startswith(
        "the program is not deterministic in one process: two runs have another value of the grad"
    )
    assert "such as the index of the batch" in message


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("config", lambda: None),
        ("model_provider", lambda pre_process=True, post_process=True: None),
        ("forward_step", lambda data_iterator: None),
        ("batch", lambda: None),
    ],
)
def test_functions_that_cannot_be_called_as_the_training_does_are_rejected(name: str, function: Any) -> None:
    with pytest.raises(VerifyError) as caught:
        Verifier(smaller(GPT, **{name: function}), steps=1)
    assert isinstance(caught.value.__cause__, TypeError)


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


def test_an_error_of_the_program_in_one_process_is_reported_with_its_line() -> None:
    def forward_step(data_iterator: Any, model: Any) -> Any:
        raise KeyError("tokens")

    with pytest.raises(VerifyError) as caught:
        Verifier(smaller(GPT, forward_step=forward_step), steps=1)
    assert isinstance(caught.value.__cause__, KeyError)


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


def test_dropout_is_rejected() -> None:
    assert rejected(smaller(GPT, hidden_dropout=0.1)).startswith("hidden_dropout is 0.1: every layout draws other")


def test_a_weight_without_a_global_name_is_rejected() -> None:
    def with_a_gate(*args: Any, **kwargs: Any) -> Any:
        model = GPT.model_provider(*args, **kwargs)
        sharded = model.decoder.sharded_state_dict
        model.decoder.gate = torch.nn.Parameter(torch.ones(3))
        model.decoder.sharded_state_dict = lambda *a, **k: {
            key: value for key, value in sharded(*a, **k).items() if not key.endswith("gate")
        }
        return model

    message = rejected(smaller(GPT, model_provider=with_a_gate))
    assert message.startswith("decoder.gate [3] of GPTModel has no global name: sharded_state_dict leaves it out")


def test_a_config_that_ignores_the_layout_is_rejected() -> None:
    def config(**parallel: Any) -> Any:
        return GPT.config(params_dtype=torch.float32, pipeline_dtype=torch.float32)

    message = rejected(dataclasses.replace(GPT, config=config))
    assert message.startswith(
        "the config has tensor_model_parallel_size=1 in the layout 'tp=2', which asks for 2; pass"
    )


def test_a_provider_that_ignores_the_layout_is_rejected() -> None:
    def whole_model(config: Any, pre_process: bool, post_process: bool, vp_stage: Any = None) -> Any:
        one_stage = dataclasses.replace(config, pipeline_model_parallel_size=1)
        return GPT.model_provider(one_stage, True, True, vp_stage)

    message = rejected(smaller(GPT, model_provider=whole_model), "pp=2")
    assert message.startswith("the model provider ignores the layout 'pp=2': a rank has ")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp=4", "layout 'dp=4' does not fit: 2 micro-batches are not divisible by dp=4; set micro_batches"),
        ("pp=4", "layout 'pp=4' does not fit: 2 layers are not divisible into 4 stages; set num_layers"),
        ("cp=16", "layout 'cp=16' does not fit: rows of 16 tokens are not divisible into 32 pieces; set seq_length"),
        ("tp=8", "layout 'tp=8' does not fit the model: "),
    ],
)
def test_a_layout_that_does_not_fit_is_rejected(layout: str, message: str) -> None:
    assert rejected(smaller(GPT), layout).startswith(message)


def test_interleaved_stages_need_enough_micro_batches() -> None:
    message = rejected(dataclasses.replace(GPT, micro_batches=2), "pp=2,vpp=2,dp=2")
    assert "a multiple of pp=2 micro-batches on each data-parallel rank, and have 1; set micro_batches" in message


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
