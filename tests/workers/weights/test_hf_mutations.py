"""Every key of config.json that is changed or left out changes the logits as in transformers, or is rejected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mcontroller.errors import MControllerError
from tests.ranks import run_ranks
from tests.training import new_context
from tests.workers.weights.hf_models import MODELS, VOCAB, save_model, transformers
from workers.config import ParallelConfig
from workers.config.model import model_config_from_hf
from workers.model.build import build_model

IDS = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(4))
# Another type or class is another model, which has other weights; the rest is of no model.
NOT_CHANGED = {"model_type", "architectures", "transformers_version"}


def changed(value: Any) -> Iterator[Any]:
    """Other values that a key might have."""
    if isinstance(value, dict):
        for key in value:
            yield {name: old for name, old in value.items() if name != key}
            yield from (value | {key: new} for new in changed(value[key]))
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 2 * value)
    elif isinstance(value, float):
        yield from (2 * value, 0.0)
    elif isinstance(value, str):
        yield "other"
    elif value is None:
        yield 2
    elif value:
        yield value[:-1]


def mutations(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key in config.keys() - NOT_CHANGED:
        yield f"without {key}", {name: value for name, value in config.items() if name != key}
        for value in changed(config[key]):
            yield f"{key}={value}", config | {key: value}


def of_transformers(config: dict[str, Any], state: dict[str, torch.Tensor]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(config))
    model.load_state_dict(state)
    if model.config.tie_word_embeddings:
        model.lm_head.weight.data = state["model.embed_tokens.weight"]
    with torch.no_grad():
        return model.float().eval()(IDS).logits[0]


def silently_different(path: Path, settings: dict[str, Any], rejections: type[Exception]) -> list[str]:
    """The mutations that are loaded, and with which the logits differ from those of transformers."""
    file, parallel, differences = path / "config.json", ParallelConfig(), list[str]()
    original = json.loads(file.read_text())
    state = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
    computed: dict[str, torch.Tensor] = {}
    for name, config in [("", original), *mutations(original)]:
        file.write_text(json.dumps(config))
        try:
            model = model_config_from_hf(path, dtype="float32", **settings)
            if (logits := computed.get(repr(model))) is None or model.provider == "bridge":
                context = new_context(parallel)
                [chunk] = build_model(model, parallel, context)
                with context.activate(), torch.no_grad():
                    logits = chunk.eval()(IDS, torch.arange(IDS.size(1))[None], None)[0, :, :VOCAB]
                computed[repr(model)] = logits
        except rejections:
            if not name:  # what was saved must load
                raise
            continue
        try:
            expected = of_transformers(config, state)
        except Exception as error:
            differences.append(f"{name}: transformers rejects it: {error!r:.100}")
            continue
        if expected.shape != logits.shape or (expected - logits).abs().max() > 1e-4:
            differences.append(
                f"{name}: {(expected - logits).abs().max():.1e}" if expected.shape == logits.shape else name
            )
    file.write_text(json.dumps(original))
    return differences


@pytest.mark.simulated
@pytest.mark.parametrize("name", [name for name in MODELS if name != "glm4_moe, no norms or biases"])
def test_no_key_is_read_over(name: str, tmp_path: Path) -> None:
    path = save_model(name, tmp_path, num_hidden_layers=2)
    assert "\n".join(run_ranks(silently_different, 1, path, {"verify_load": "off"}, MControllerError)[0]) == ""
