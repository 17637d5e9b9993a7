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
    """Directory of an adapter in PEFT's format to start from. None: a new one, which changes nothing at first."""
    names: list[str] = field(default_factory=list)
    """Names of several adapters on one base, each with its optimizer; a call chooses one with meta_info["adapter"]."""

    def __post_init__(self) -> None:
        check_at_least("model.lora.rank", self.rank, 1)
        check_above("model.lora.alpha", self.alpha, 0.0)
        if not 0.0 <= self.dropout < 1.0:
            text = f"model.lora.dropout is {self.dropout}; it must be at least 0 and less than 1"
            raise ConfigError(text, key="model.lora.dropout", value=self.dropout)
        if len(set(self.names)) != len(self.names):
            text = f"model.lora.names is {self.names}; every adapter needs a name of its own"
            raise ConfigError(text, key="model.lora.names", value=self.names)
        if self.path is None:
            return
        for name, value in peft_fields(self.path).items():
            own = getattr(self, name)
            if sorted(own) != sorted(value) if isinstance(value, list) else own != value:
                raise ConfigError(
                    f"model.lora.{name} is {own!r}, and the adapter at {self.path!r} has {value!r}: leave "
                    f"model.lora.{name} out, or set the same",
                    key=f"model.lora.{name}",
                    value=own,
                )

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    @staticmethod
    def find_fields(fields: Mapping[str, Any], missing: Sequence[str], key: str) -> dict[str, Any]:
        """Return the fields that the adapter at ``path`` determines; called by ``load_config``.

        Raises:
            ConfigError: ``path`` is not set, or its ``adapter_config.json`` cannot be used.
        """
        if fields["path"] is None:
            text = f"{', '.join(key + name for name in missing)} is not set: set it, or {key}path of an adapter"
            raise ConfigError(text, key=f"{key}{missing[0]}", missing=list(missing))
        return peft_fields(fields["path"])


_ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": ([], None),
    "layer_replication": ([], None),
    "modules_to_save": (None, []),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
}
"""Keys of ``adapter_config.json`` that change what is computed, and their supported values."""


def peft_fields(path: str) -> dict[str, Any]:
    """Return the fields of LoraConfig that ``adapter_config.json`` in a directory determines.

    Raises:
        ConfigError: there is no such file, it is damaged, or a key has a value that is not supported.
    """
    file = Path(path) / "adapter_config.json"
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"model.lora.path: {str(file)!r} cannot be read: {error!r}; expected an adapter in PEFT's format"
        raise ConfigError(text, key="model.lora.path", value=path) from error
    for key, supported in _ONLY.items():
        if config.get(key, supported[0]) not in supported:
            raise ConfigError(
                f"model.lora.path: {str(file)!r} has {key}={config[key]!r}; only {supported[0]!r} is supported",
                key="model.lora.path",
                value=path,
            )
    modules, parameters = config.get("target_modules") or [], config.get("target_parameters") or []
    targets = [modules] if isinstance(modules, str) else list(modules)
    found: dict[str, Any] = {"rank": rank, "alpha": alpha, "targets": [*targets, *parameters]}
    return found | {"use_rslora": bool(config.get("use_rslora")), "experts": bool(parameters)}
