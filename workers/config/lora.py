"""LoraConfig: low-rank adapters beside a model's frozen weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcontroller.config.checks import check_above, check_at_least
from mcontroller.config.fields import strict_fields
from mcontroller.errors import ConfigError

_READ = frozenset(("r", "lora_alpha", "use_rslora", "target_modules", "target_parameters", "exclude_modules"))
"""Keys of ``adapter_config.json`` from which ``peft_fields`` makes fields."""
_INERT = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        "task_type",
        # of training
        "lora_dropout",
        "eva_config",
        "runtime_config",
        # of features that are off
        "megatron_core",
        "qalora_group_size",
    )
)
"""Keys that change nothing that a loaded adapter computes."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (
        True,
        False,
        None,
        "gaussian",
        "orthogonal",
        "eva",
    ),  # others change the base as PEFT loads it
}
"""Keys with the values at which the adapter is what this project computes."""
_OFF: tuple[Any, ...] = (None, False, "", [], {})
"""PEFT's defaults of all other keys, also of ones that it does not have yet: the feature is off."""


@strict_fields
@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters of low rank (Hu et al., 2021, arXiv:2106.09685); the model's own weights are frozen.

    With ``path`` set, ``load_config`` reads what is not set from the adapter's ``adapter_config.json``.
    """

    rank: int
    """Rank of every adapter, at least 1."""
    alpha: float
    """The adapter's output is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers with an adapter, by PEFT's names (q_proj, gate_proj, all-linear) or Megatron's (linear_qkv).

    A name is the end of a layer's whole name, and may contain ``*``: ``layers.0.*.q_proj``.
    """
    exclude: list[str] = field(default_factory=list)
    """Linear layers without an adapter, by names as in targets."""
    experts: bool = True
    """Whether the names in targets select layers of experts too. Gate and up of an expert have one A, as in PEFT."""
    dropout: float = 0.0
    """Dropout probability of an adapter's input, 0 to 1."""
    use_rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (Kalajdzievski, 2023, arXiv:2312.03732)."""
    path: str | None = None
    """Directory of an adapter in PEFT's format to start from. None: a new one, which changes nothing at first.

    A key of its adapter_config.json that is not read, and does not have PEFT's default, is an error.
    """

    def __post_init__(self) -> None:
        check_at_least("model.lora.rank", self.rank, 1)
        check_above("model.lora.alpha", self.alpha, 0.0)
        if not 0.0 <= self.dropout < 1.0:
            text = f"model.lora.dropout is {self.dropout}; it must be at least 0 and less than 1"
            raise ConfigError(text, key="model.lora.dropout", value=self.dropout)
        if self.path is None:
            return
        for name, value in peft_fields(self.path).items():
            configured = getattr(self, name)
            if name == "exclude":  # whether the adapter has what is left, its tensors tell
                differs = not set(value) <= set(configured)
            else:
                differs = sorted(configured) != sorted(value) if isinstance(value, list) else configured != value
            if differs:
                raise ConfigError(
                    f"model.lora.{name} is {configured!r}, and the adapter at {self.path!r} has {value!r}: leave "
                    f"model.lora.{name} out, or set the same",
                    key=f"model.lora.{name}",
                    value=configured,
                )

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    @staticmethod
    def find_fields(fields: Mapping[str, Any], missing: Sequence[str], key: str) -> dict[str, Any]:
        """Return the fields that the adapter at ``path`` determines; called by ``load_config``.

        Raises:
            ConfigError: fields are missing and ``path`` is not set, or its ``adapter_config.json`` cannot be used.
        """
        if fields["path"] is None and not missing:
            return {}
        if fields["path"] is None:
            text = f"{', '.join(key + name for name in missing)} is not set: set it, or {key}path of an adapter"
            raise ConfigError(text, key=f"{key}{missing[0]}", missing=list(missing))
        return peft_fields(fields["path"])


def peft_fields(path: str) -> dict[str, Any]:
    """Return the fields of LoraConfig that ``adapter_config.json`` in a directory determines.

    Every key is read, or changes nothing, or has a value at which it changes nothing.

    Raises:
        ConfigError: there is no such file, it is damaged, or a key has a value that is not supported: ``field`` names
            it.
    """
    file = Path(path) / "adapter_config.json"
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha = config["r"], float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"model.lora.path: {str(file)!r} cannot be read: {error!r}; expected an adapter in PEFT's format"
        raise ConfigError(text, key="model.lora.path", value=path) from error
    for key, value in config.items():
        supported = _ONLY.get(key, _OFF)
        if key not in _READ | _INERT and not any(
            value == allowed and type(value) is type(allowed) for allowed in supported
        ):
            raise _unsupported(path, key, value, repr(supported[0]))
    if type(rank) is not int:
        raise _unsupported(path, "r", rank, "a whole number")
    if config.get("use_rslora") not in (None, False, True):
        raise _unsupported(path, "use_rslora", config["use_rslora"], "true or false")
    names = {key: config.get(key) or [] for key in ("target_modules", "target_parameters", "exclude_modules")}
    if names["target_modules"] == "all-linear":
        names["target_modules"] = ["all-linear"]
    for key, value in names.items():
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _unsupported(path, key, value, "a list of names")
    return {
        "rank": rank,
        "alpha": alpha,
        "targets": names["target_modules"] + names["target_parameters"],
        "exclude": names["exclude_modules"],
        "use_rslora": bool(config.get("use_rslora")),
        "experts": bool(names["target_parameters"]),
    }


def _unsupported(path: str, key: str, value: Any, supported: str) -> ConfigError:
    file = str(Path(path) / "adapter_config.json")
    return ConfigError(
        f"model.lora.path: {file!r} has {key}={value!r}; only {supported} is supported: merge the adapter into its "
        "base with PEFT (merge_and_unload), and set model.hf_path to the result",
        key="model.lora.path",
        value=path,
        field=key,
        actual=value,
    )
