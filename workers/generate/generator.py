"""Generate with the current weights of a policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcontroller.data.batch import DataProto
from mcontroller.dispatch.modes import Dispatch
from mcontroller.dispatch.registration import register
from mcontroller.errors import DataError, before_changes
from parallel_state.agreement import all_gather_values, raise_on_every_rank
from workers.columns import HELD_OUT_BATCH, ROUTED_EXPERTS
from workers.config import ActorConfig, RolloutConfig
from workers.generate.engine_weights import EngineWeights
from workers.generate.rollout_protocol import Generated, LogProbBasis, Prompts, Rollout
from workers.generate.sampling import Sampling, later_seeds, prompt_hashes, sample_seeds
from workers.lora.adapters import without_adapters
from workers.lora.peft_files import adapter_tensors, peft_config
from workers.memory.offloader import Offloader
from workers.train.batch_checks import check_prompts
from workers.train.batches import tensor_columns
from workers.train.state import TrainingState
from workers.weights.hf.model import checkpoint_tensors, hf_whole_tensors
from workers.weights.whole_tensors import StreamedTensors, WholeTensors

_Weights = WholeTensors | StreamedTensors


class Generator:
    """Generates with the rollout of a worker, after its weights were updated to the policy's.

    As a part that can be offloaded, it is the rollout: which comes back without its weights.

    Args:
        config: of the actor.
        state: the policy, and the number of batches that were sampled so far, on which the seeds of the next depend.
        offloader: brings back the weights of the policy.
        serves_engine: whether the worker has an engine with the weights, and no model.

    Attributes:
        serves_engine: as passed.
        rollout: the engine; None until ``use``.
        version: the ``weights_version`` of the weights that it has; None if it has none.
    """

    def __init__(self, config: ActorConfig, state: TrainingState, offloader: Offloader, serves_engine: bool) -> None:
        self._config, self._state, self._offloader = config, state, offloader
        self.serves_engine = serves_engine
        self._weights: tuple[Any, _Weights] | None = None  # of the model
        self._sends_adapter = config.rollout.engine == "vllm" and config.rollout.vllm.adapter_alone
        self._has_base = False
        self.rollout: Any = None
        self.version: int | None = None
        state.counters["sampled_batches"] = 0
        if serves_engine:
            offloader.serves_engine()

    def use(self, rollout: Rollout) -> None:
        """Generate with this rollout from now on."""
        self.rollout = rollout
        self._engine_weights = EngineWeights(self._config.rollout, rollout)
        if rollout.holds_weights:
            self._offloader.sleepers["rollout"] = self
        else:
            self._offloader.needs["generate_sequences"] = ("params",)
        if rollout.sleeps_beside_training:
            self._offloader.alone.add("rollout")

    def generate(self, prompts: DataProto) -> DataProto | None:
        """Generate ``n`` responses to every prompt; see ``ActorRolloutRefWorker.generate_sequences``."""
        config, counters, info = self._config, self._state.counters, prompts.meta_info
        call = counters["sampled_batches"]
        if HELD_OUT_BATCH in info:
            call = -1 - int(info[HELD_OUT_BATCH])
        elif "sample_seed" not in prompts.tensor_names:
            counters["sampled_batches"] += bool(info.get("do_sample", config.rollout.do_sample))
        rollout, metrics = self.current_rollout()
        generated = generate_batch(
            rollout,
            prompts,
            config.rollout,
            vocab_size=config.model.vocab_size,
            call=call,
            dp_group=self._state.context.pg.dp,
        )
        if generated is None:
            return None
        version = torch.full((len(generated),), self._state.policy_version, dtype=torch.long)
        generated = generated.with_tensors({"policy_version": version})
        generated.meta_info.setdefault("temperature", config.rollout.temperature)
        generated.meta_info.setdefault("n", config.rollout.n)
        if metrics:
            generated.meta_info["metrics"] = {f"rollout/{name}": value for name, value in metrics.items()}
        return generated

    def current_rollout(self) -> tuple[Rollout, Mapping[str, float]]:
        """Return the rollout with the policy's current weights, and the metrics of updating them.

        If the policy was offloaded, it is offloaded again before a rollout with a copy of the weights generates.
        """
        assert self.rollout is not None
        metrics: Mapping[str, float] = {}
        if not self.rollout.holds_weights or self.version != self._state.weights_version:
            was_offloaded = "params" in self._offloader.offloaded.parts
            weights = self._weights_of_checkpoint() if self.serves_engine else self.rollout_weights()
            metrics = self._update_engine(weights)
            self.rollout.resume(self._state.policy_version)
            self.version = self._state.weights_version
            if was_offloaded and self.rollout.holds_weights:
                self._offloader.offload(("params",))
        return self.rollout, metrics

    def _update_engine(self, weights: _Weights) -> Mapping[str, float]:
        """Update the weights of the engine; if it computes adapters, only those once it has the base."""
        assert self.rollout is not None
        if not self._sends_adapter:
            return self._engine_weights.update(weights, self._state.weights_version)
        model, rollout, metrics = self._state.model, self.rollout, dict[str, float]()
        if not self._has_base:
            with without_adapters(model):
                metrics |= self._engine_weights.update(weights, self._state.weights_version)
            self._has_base = True
        tensors = adapter_tensors(model, rollout.receivers)
        of_adapter = rollout.update_adapter(tensors, peft_config(model, self._config.model))
        return metrics | {name: value + metrics.get(name, 0.0) for name, value in of_adapter.items()}

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def rollout_weights(self) -> _Weights:
        """Return the policy's current weights, for the engine that generates: a stream of named tensors.

        The engine calls this on the worker, not through a group. Offloaded weights are brought back to the device.
        """
        self._offloader.reload_for("rollout_weights")
        model = self._state.model
        if self._weights is None or self._weights[0] is not model:
            bucket_bytes = self._config.rollout.vllm.bucket_bytes
            self._weights = model, hf_whole_tensors(model, self._state.context, bucket_bytes)
        return self._weights[1]

    def _weights_of_checkpoint(self) -> StreamedTensors:
        """Return the weights of ``model.hf_path`` for an engine that has got none from another group.

        Raises:
            DataError: there is no such path, or the engine had other weights, which it has lost.
        """
        path, lost = self._config.model.hf_path, self._state.received_version is not None
        lora = self._config.model.lora
        if path is None or lost or (lora is not None and lora.path is not None):
            with before_changes():
                raise DataError(
                    "the engine has no weights"
                    + (" any more, since it has slept" if lost else "")
                    + (f" with the adapter {lora.path!r}" if lora is not None and lora.path is not None else "")
                    + ": run a WeightTransfer to this group first"
                    + ("" if path is not None else ", or set model.hf_path")
                )
        return checkpoint_tensors(path, self._config.rollout.vllm.bucket_bytes)

    def generation_limits(self) -> dict[str, Any]:
        """Return what ``generate_sequences`` accepts: the longest prompt and response, and the vocabulary.

        ``max_rows`` is the most rows that are generated at once; ``n``, ``temperature``,
        ``do_sample`` and ``seed`` are the defaults of a call. ``takes_requests``: whether engines take requests, at
        ``engine_addresses``.
        """
        rollout, vocab_size = self._config.rollout, self._config.model.vocab_size
        names = ("prompt_length", "response_length", "max_rows", "n", "temperature", "do_sample", "seed")
        limits = {name: getattr(rollout, name) for name in names}
        return limits | {
            "vocab_size": vocab_size,
            "takes_requests": self.rollout is not None and self.rollout.takes_requests,
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def engine_addresses(self) -> Any:
        """Bring the engine up to date, and return where that of this rank takes requests; None without one."""
        rollout, _ = self.current_rollout()
        return rollout.address()

    def sampling_state(self) -> dict[str, int]:
        """Return the state that the samples of the next ``generate_sequences`` depend on, of values for JSON.

        The checkpoint of an actor that generates has it; the trainer saves the checkpoint of a group that only
        generates.
        """
        return {"sampled_batches": self._state.counters["sampled_batches"]}

    def restore_sampling(self, state: Mapping[str, int]) -> None:
        """Continue to sample from a ``sampling_state``."""
        self._state.counters["sampled_batches"] = state["sampled_batches"]

    def sleep(self) -> int:
        """Free the device memory of the rollout, and return how many bytes that were."""
        assert self.rollout is not None
        self.version, self._has_base = None, False
        return self.rollout.sleep()

    def wake_up(self) -> None:
        """Allocate the device memory of the rollout again."""
        assert self.rollout is not None
        self.rollout.wake_up()


def generate_batch(
    rollout: Rollout,
    prompts: DataProto,
    config: RolloutConfig,
    *,
    vocab_size: int,
    call: int,
    dp_group: dist.ProcessGroup,
) -> DataProto | None:
    """Generate ``n`` responses for every prompt; see ``ActorRolloutRefWorker.generate_sequences``.

    Args:
        rollout: the engine that generates.
        prompts: this rank's prompts; ``meta_info`` may override the fields of ``config``.
        config: the default settings of sampling.
        vocab_size: token ids must be less than this.
        call: number of batches that were sampled before, on which every seed depends; negative for held-out problems.
        dp_group: the ranks over which the batch is divided.

    Returns:
        The batch with the responses; None if the rollout returns None on this rank.

    Raises:
        DataError: on every rank of ``dp_group``, if the prompts of one of them are invalid (see ``check_prompts``);
            if ``meta_info`` lacks a token id or has one outside the vocabulary.
        ConfigError: if a setting in ``meta_info`` is invalid.
    """
    columns, rows = tensor_columns(prompts), len(prompts)
    with before_changes():
        sampling = Sampling.of(config, prompts.meta_info)
        if not 0 <= sampling.pad_token_id < vocab_size:
            raise DataError(
                f"generate_sequences: pad_token_id is {sampling.pad_token_id}, expected a token id of the vocabulary, "
                f"0 to {vocab_size - 1}",
                method="generate_sequences",
                token=sampling.pad_token_id,
            )
        if max(all_gather_values(rows, dp_group)) > 0 and rows == 0:
            columns = _placeholder_prompt(columns)
        spare = config.response_length - sampling.response_length  # a later turn continues a response
        limits = {"vocab_size": vocab_size, "prompt_length": config.prompt_length + spare}
        raise_on_every_rank(lambda: check_prompts(columns, method="generate_sequences", **limits), dp_group)
        raise_on_every_rank(lambda: _check_seeds(columns, sampling), dp_group)
    ids, attention = columns["input_ids"].long(), columns["attention_mask"].long()
    if "sample_seed" in columns:
        seeds = later_seeds(columns["sample_seed"], columns.get("generated", torch.zeros(len(ids), dtype=torch.long)))
    else:
        seeds = _seeds(ids, attention, rows, sampling, call, dp_group)
    requested = Prompts(ids, attention, seeds.view(len(ids), sampling.n))
    generated = rollout.generate(requested, sampling)
    if generated is None:
        return None
    tensors, meta_info = _sequences(requested, generated, rows * sampling.n), dict(prompts.meta_info)
    if generated.basis not in (None, LogProbBasis(sampling.temperature, False)):
        assert generated.basis is not None
        tensors["engine_log_probs"] = tensors.pop("rollout_log_probs")
        meta_info["engine_log_probs"] = generated.basis._asdict()
    others = {name: column.repeat(sampling.n, 0) for name, column in prompts.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, others, meta_info)


def _sequences(requested: Prompts, generated: Generated, samples: int) -> dict[str, Tensor]:
    """The columns of the first ``samples`` sequences, on the CPU, without the sequences of a placeholder after them."""
    responses, mask, log_probs, *experts = (column[:samples].cpu() for column in generated.columns())
    ids, attention = (column[:samples] for column in requested.samples()[:2])
    whole = torch.cat((attention, mask), 1)
    return {
        "prompts": ids,
        "responses": responses,
        "response_mask": mask,
        "rollout_log_probs": log_probs,
        "input_ids": torch.cat((ids, responses), 1),
        "attention_mask": whole,
        "position_ids": (whole.cumsum(1) - 1).clamp(min=0),
    } | ({ROUTED_EXPERTS: experts[0]} if experts else {})


def _placeholder_prompt(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One prompt of one token for a rank without prompts, which must take part in collectives; its result is dropped.

    It must not be a copy of another prompt: it would count as a sample of that prompt.
    """
    placeholder = {name: column.new_zeros((1, *column.shape[1:])) for name, column in columns.items()}
    if "attention_mask" in placeholder:
        placeholder["attention_mask"][:, -1] = 1
    return placeholder


def _check_seeds(columns: Mapping[str, Tensor], sampling: Sampling) -> None:
    """Raise DataError unless the seeds are one for each response."""
    for name in {"sample_seed", "generated"} & columns.keys():
        column, rows = columns[name], len(columns["input_ids"])
        if column.dtype != torch.int64 or column.shape != (rows,) or sampling.n != 1 or "sample_seed" not in columns:
            raise DataError(
                f"generate_sequences: column {name!r} is {column.dtype} {list(column.shape)} with n={sampling.n}; "
                f"expected sample_seed, and with it generated, each int64 [{rows}], and n=1: repeat the prompts of a "
                "group, and give each row a seed",
                method="generate_sequences",
                column=name,
            )


def _seeds(
    ids: Tensor, attention: Tensor, rows: int, sampling: Sampling, call: int, dp_group: dist.ProcessGroup
) -> Tensor:
    """A seed for every sample of this rank, 0 for samples of a placeholder (a collective over dp).

    See ``sampling.sample_seeds``.
    """
    if not sampling.do_sample:
        return torch.zeros(len(ids) * sampling.n, dtype=torch.long)
    mine = prompt_hashes(ids, attention)[:rows].tolist()
    earlier = Counter(value for shard in all_gather_values(mine, dp_group)[: dp_group.rank()] for value in shard)
    seeds = sample_seeds(mine, earlier, n=sampling.n, seed=sampling.seed, call=call)
    return torch.cat((seeds, seeds.new_zeros((len(ids) - rows) * sampling.n)))
