"""Compare a model with transformers, layer by layer, after a load and after an export: a difference is an error.

A few fixed tokens go through the parallel model. Each pipeline stage then computes its own layers once more on the
CPU, with transformers, from the same files: every layer from the hidden states that the parallel model gave it, so that
the first layer that differs is the wrong one, and only one layer is in memory. How far results may differ follows from
transformers' own rounding: the difference between its results in the model's dtype and in a wider one.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.utils import get_model_config
from torch import Tensor, nn

from mcontroller.errors import ConfigError, DataError
from parallel_state.agreement import all_gather_values
from parallel_state.megatron import MegatronContext
from workers.schedule import releasing_inputs, run_schedule, scoring
from workers.weights.hf.config import family_at, model_fields_from_hf, read_config
from workers.weights.hf.files import WeightFiles, weight_paths
from workers.weights.hf.hub import local_directory
from workers.weights.hf.names import names_of
from workers.zigzag import zigzag_join, zigzag_positions

LARGEST_AUTOMATIC = 1 << 30
"""[bytes] Files of the largest model that ``model.verify_load=auto`` compares: half a billion weights of 16 bits."""

_TOKENS = 32
_NOT_COMPUTED = frozenset(("family", "hf_path", "dtype", "max_sequence_length", "transformer"))
# Parameters of a layer in transformers that several tensors of the files make up -> their name in Megatron.
_STACKED = {
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.experts.gate_up_proj": "mlp.experts.linear_fc1.weight{expert}",
    "mlp.experts.down_proj": "mlp.experts.linear_fc2.weight{expert}",
}


def verify_load(chunks: Sequence[nn.Module], model: Any, context: MegatronContext) -> str:
    """Compare a model with what transformers computes from the files at ``model.hf_path`` (a collective).

    Args:
        chunks: this rank's model chunks, not wrapped.
        model: its ``ModelConfig``.
        context: its layout, which is active.

    A model of a built-in family is left out with ``model.verify_load=auto`` if transformers does not have it, if it is
    large, or if it is configured otherwise than its ``config.json``; a model of another provider never is.

    Returns:
        What was compared, the largest difference and the time, or why nothing was compared.

    Raises:
        DataError: on every rank, if a layer differs; ``layer`` is the name of the first one.
        ConfigError: the model cannot be compared, and is not left out.
    """
    started, path = time.perf_counter(), str(model.hf_path)
    family, automatic = family_at(path), model.verify_load == "auto" and model.provider == "native"
    kind = (family and family.reference_type) or str(read_config(path).get("model_type"))
    reason = _cannot(kind) or (_should_not(model) if automatic else None)
    if reason is not None:
        if not automatic:
            raise ConfigError(
                f"model.verify_load is {model.verify_load!r} and model.provider {model.provider!r}, but {reason}: set "
                "model.verify_load=off",
                key="model.verify_load",
                value=model.verify_load,
            )
        return f"model.verify_load=auto: not compared with transformers: {reason}"
    recorded = _recorded(chunks, context)
    differences: list[_Difference] = []
    if context.pg.dp_cp.rank() == 0 and context.pg.tp.rank() == 0:
        config = get_model_config(chunks[0])
        with_experts = config.num_moe_experts is not None
        reference = _Reference(Path(local_directory(path)), kind, names_of(family), config.params_dtype, with_experts)
        differences = [result for part in recorded if (result := _compared(reference, part)) is not None]
    everywhere = sorted(difference for names in all_gather_values(differences) for difference in names)
    for difference in everywhere:
        if difference.differs:
            raise DataError(
                f"{difference.name} of the model at {model.hf_path} differs from transformers: {difference.share:.0%} "
                f"of {_TOKENS} tokens by more than rounding, by up to {difference.relative:.1e} of their length. Its "
                "weights or its configuration are read or written wrongly: report it, or set model.verify_load=off; in "
                "a family that you are adding, look at names, inert and fields_from",
                layer=difference.name,
            )
    largest, seconds = max(difference.relative for difference in everywhere), time.perf_counter() - started
    return (
        f"model.verify_load: {len(everywhere)} parts of the model are transformers', largest relative difference "
        f"{largest:.1e}; {seconds:.1f} s"
    )


class _Part(NamedTuple):
    """What one part of the model got and returned, ``[tokens, width]``; no input if it got tokens."""

    place: int  # -1 the embedding, then layers, after the last one the output
    name: str
    given: Tensor | None
    returned: Tensor


class _Difference(NamedTuple):
    place: int
    name: str
    differs: bool
    share: float
    relative: float


def _cannot(kind: str) -> str | None:
    """Why the model is not computed with transformers."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return None if kind in CONFIG_MAPPING else f"transformers has no model of type {kind!r}"


def _should_not(model: Any) -> str | None:
    """Why the model is not compared without being asked to."""
    path = Path(str(model.hf_path))
    size = sum(file.stat().st_size for file in weight_paths(path))
    if size > LARGEST_AUTOMATIC:
        return f"its files have {size / 1e9:.1f} GB, more than {LARGEST_AUTOMATIC / 1e9:.1f}; set layers to compare it"
    fields = model_fields_from_hf(path)
    inside = fields.get("transformer", {})
    changed = [f"model.{name}" for name in fields if name not in _NOT_COMPUTED and getattr(model, name) != fields[name]]
    changed += [f"model.transformer.{name}" for name in inside if model.transformer.get(name) != inside[name]]
    if model.transformer.get("fp8"):
        changed.append("model.transformer.fp8")
    return f"{', '.join(changed)} differ from its config.json" if changed else None


def _ids(vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0))


def _recorded(chunks: Sequence[Any], context: MegatronContext) -> list[_Part]:
    """Run the tokens through the model, and return what the parts on this rank got and returned."""
    pg, config, device = context.pg, get_model_config(chunks[0]), torch.device(torch.cuda.current_device())
    multiple = 2 * pg.cp.size() * pg.tp.size()
    whole = -(-_TOKENS // multiple) * multiple
    ids = torch.nn.functional.pad(_ids(chunks[0].unpadded_vocab_size), (0, whole - _TOKENS)).to(device)
    positions = zigzag_positions(whole, pg.cp.size(), pg.cp.rank(), device)[None]
    hidden_states: dict[int, tuple[Tensor, Tensor]] = {}
    outputs: list[Tensor] = []

    def record(layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        given = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        returned = output[0] if isinstance(output, tuple) else output
        # Copies: after a stage has sent its output, the schedule frees the memory.
        number = layer.layer_number - 1  # two layers of a HybridModel have the number of one
        first, _ = hidden_states.get(number, (given.clone(), None))
        hidden_states[number] = first, returned.clone()

    def step(_: Any, chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        output = chunk(ids.gather(1, positions), positions, None, runtime_gather_output=True)
        if chunk.post_process:
            outputs.append(output)
        return output, lambda output, non_loss_data: None

    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers]
    count = pg.pp.size() if len(chunks) > 1 else 1
    with scoring(chunks), releasing_inputs(chunks):
        run_schedule(chunks, step, [None] * count, [(1, whole)] * count, pg, forward_only=True)
    for hook in hooks:
        hook.remove()
    joined = functools.partial(_joined, context=context, divided=config.sequence_parallel)
    hidden = {number: (joined(given), joined(returned)) for number, (given, returned) in sorted(hidden_states.items())}
    parts = [_Part(number, f"model.layers.{number}", *both) for number, both in hidden.items()]
    if chunks[0].pre_process:
        parts.insert(0, _Part(-1, "model.embed_tokens", None, hidden[0][0]))
    if outputs:
        logits = _joined(outputs[0].transpose(0, 1), context=context, divided=False)
        parts.append(_Part(config.num_layers, "lm_head", hidden[config.num_layers - 1][1], logits))
    return parts


def _joined(states: Tensor, *, context: MegatronContext, divided: bool) -> Tensor:
    """Return ``[tokens, width]`` of ``[this rank's tokens, 1, width]``, on the CPU."""
    states, cp = states.detach(), context.pg.cp
    if divided:
        states = gather_from_sequence_parallel_region(states.contiguous(), group=context.pg.tp)
    if cp.size() > 1:
        parts = [torch.empty_like(states) for _ in range(cp.size())]
        dist.all_gather(parts, states.contiguous(), group=cp)
        states = zigzag_join(parts, dim=0)
    return states[:_TOKENS, 0].cpu()


class _Reference:
    """The parts of the model in transformers; weights are read when a part is computed.

    Args:
        path: the checkpoint.
        kind: its ``model_type`` in transformers.
        names: as ``ModelFamily.names``.
        dtype: of the parallel model.
        with_experts: whether the model has some.
    """

    def __init__(
        self, path: Path, kind: str, names: Mapping[str, tuple[str, ...]], dtype: torch.dtype, with_experts: bool
    ) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        self.files, self.names, self.dtype, self.with_experts = WeightFiles(path), names, dtype, with_experts
        self.wide = torch.float64 if dtype == torch.float32 else torch.float32
        source, _ = CONFIG_MAPPING[kind].get_config_dict(path)  # decodes infinities
        config = CONFIG_MAPPING[kind].from_dict(source | {"quantization_config": None})
        config._experts_implementation = "eager"
        if hasattr(config, "time_step_min"):  # Megatron does not limit the step of a Mamba layer
            config.time_step_min = 1e-30
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        self.model: Any = whole.model
        norm = "norm" if hasattr(self.model, "norm") else "norm_f"
        self.layers, self.norm = list(self.model.layers), getattr(self.model, norm)
        setattr(self.model, norm, nn.Identity())
        if hasattr(self.model, "rotary_emb"):
            self.model.rotary_emb = type(self.model.rotary_emb)(self.model.config)
        self.model.config.num_hidden_layers = 1
        self.types = getattr(self.model.config, "layer_types", None)
        self.prefix = names["embedding.word_embeddings.weight"][0].partition(".")[0]
        self.vocabulary: int = config.vocab_size

    def in_both(self, part: _Part) -> tuple[Tensor, Tensor] | None:
        """Return the part's results in the model's dtype and in a wider one; None for an output that is no logits."""
        if part.given is None:
            rows = self._read("embedding.word_embeddings.weight")[_ids(self.vocabulary)[0]]
            scale = getattr(self.model.get_input_embeddings(), "scalar_embed_scale", 1.0)
            return rows.to(self.dtype) * scale, rows.to(self.wide) * scale
        if part.place < len(self.layers):
            layer = copy.deepcopy(self.layers[part.place]).to_empty(device="cpu")
            self._fill(layer, part.place)
            self.model.layers = nn.ModuleList([layer])
            if self.types is not None:
                self.model.config.layer_types = [self.types[part.place]]
            computed = [self._layer(layer, part.given, dtype) for dtype in (self.dtype, self.wide)]
        elif part.returned.size(-1) == 1:
            return None
        else:
            norm = copy.deepcopy(self.norm).to_empty(device="cpu")
            norm.weight.data = self._read("decoder.final_layernorm.weight").to(self.dtype)
            name = self.names["output_layer.weight"][0]
            tied = self.model.config.tie_word_embeddings or name not in self.files.names
            head = self._read("embedding.word_embeddings.weight" if tied else "output_layer.weight").to(self.dtype)
            computed = []
            for dtype in (self.dtype, self.wide):
                norm, head = norm.to(dtype), head.to(dtype)
                computed.append(norm(part.given.to(dtype)) @ head.T)
        return computed[0], computed[1]

    def _layer(self, layer: nn.Module, given: Tensor, dtype: torch.dtype) -> Tensor:
        for parameter in layer.parameters():
            parameter.data = parameter.data.to(dtype)
        result: Tensor = self.model(inputs_embeds=given[None].to(dtype), use_cache=False).last_hidden_state[0]
        return result

    def _fill(self, layer: nn.Module, number: int) -> None:
        for name, tensor in layer.state_dict(keep_vars=True).items():
            values = self._values(name, number)
            if values.shape != tensor.shape:
                text = f"model.layers.{number}.{name} is {list(tensor.shape)} in transformers, and {list(values.shape)}"
                raise DataError(f"{text} in the files: set model.verify_load=off", layer=f"model.layers.{number}")
            is_weight = isinstance(tensor, nn.Parameter)
            tensor.data = values.to(self.dtype) if is_weight else values.float()

    def _values(self, name: str, number: int) -> Tensor:
        """Return a parameter of a layer, stacked from the tensors of experts if the files have those."""
        on_disk = f"{self.prefix}.layers.{number}.{name}"
        if on_disk in self.files.names or name not in _STACKED:
            return self.files.read(on_disk)
        templates = self.names[f"decoder.layers.{{layer}}.{_STACKED[name]}"]
        if "{expert}" not in templates[0]:
            return self.files.read(templates[0].format(layer=number))
        experts, stacked = 0, []
        while templates[0].format(layer=number, expert=experts) in self.files.names:
            names = [template.format(layer=number, expert=experts) for template in templates]
            stacked.append(torch.cat([self.files.read(hf_name) for hf_name in names]))
            experts += 1
        return torch.stack(stacked)

    def _read(self, name: str) -> Tensor:
        return self.files.read(self.names[name][0])


@torch.no_grad()
def _compared(reference: _Reference, part: _Part) -> _Difference | None:
    """Return how much a part's results differ, as shares of the lengths of the tokens' vectors."""
    both = reference.in_both(part)
    if both is None:
        return None
    narrow, wide = (tensor.double() for tensor in both)
    length = wide.norm(dim=-1).clamp(min=1e-30)
    error = (part.returned[:, : wide.size(-1)].double() - wide).norm(dim=-1) / length
    rounding = (narrow - wide).norm(dim=-1) / length
    exact = reference.dtype == torch.float32
    limit = (10 * rounding).clamp(min=1e-5 if exact else 2**-7)
    share = float((error > limit).double().mean())
    # In 16 bits, rounding sends some tokens to other experts.
    allowed = 0.25 if not exact and reference.with_experts else 0.0
    return _Difference(part.place, part.name, not share <= allowed, share, float(error.max()))
