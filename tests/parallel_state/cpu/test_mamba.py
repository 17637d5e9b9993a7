"""The functions of Mamba layers on a CPU compute what transformers' mixer computes, and packed rows apart."""

from __future__ import annotations

import torch
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from parallel_state.cpu.mamba import GroupedRMSNorm, convolve_and_scan

HEADS, CHANNELS, GROUPS, STATE, HIDDEN, CHUNK = 4, 6, 2, 5, 16, 4


def mixer_of_transformers() -> NemotronHMamba2Mixer:
    config = NemotronHConfig(
        hidden_size=HIDDEN,
        layers_block_type=["linear_attention"],
        ssm_state_size=STATE,
        mamba_num_heads=HEADS,
        mamba_head_dim=CHANNELS,
        n_groups=GROUPS,
        chunk_size=CHUNK,
        time_step_min=0.0,
    )
    torch.manual_seed(1)
    mixer = NemotronHMamba2Mixer(config, layer_idx=0)
    for weight in mixer.parameters():
        torch.nn.init.uniform_(weight, -0.5, 0.5)
    return mixer


def mixed(mixer: NemotronHMamba2Mixer, hidden: torch.Tensor, sequences: torch.Tensor | None = None) -> torch.Tensor:
    norm = GroupedRMSNorm(HEADS * CHANNELS, eps=1e-5, group_size=HEADS * CHANNELS // GROUPS)
    norm.weight = mixer.norm.weight
    scanned = convolve_and_scan(
        mixer.in_proj(hidden),
        mixer.conv1d.weight[:, 0],
        mixer.conv1d.bias,
        mixer.dt_bias,
        -mixer.A_log.exp(),
        mixer.D,
        chunk_size=CHUNK,
        headdim=CHANNELS,
        ngroups=GROUPS,
        seq_idx=sequences,
    )
    return mixer.out_proj(norm(scanned))


def test_outputs_and_gradients_are_those_of_transformers() -> None:
    mixer, hidden = mixer_of_transformers(), torch.randn(3, 11, HIDDEN)
    outputs = mixed(mixer, hidden), mixer(hidden)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    weights = list(mixer.parameters())
    for own, theirs in zip(*(torch.autograd.grad(output.square().sum(), weights) for output in outputs), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)


def test_packed_rows_are_computed_apart() -> None:
    mixer, hidden = mixer_of_transformers(), torch.randn(1, 12, HIDDEN)
    sequences = torch.tensor([[0] * 3 + [1] * 8 + [2]])
    apart = torch.cat([mixed(mixer, part) for part in hidden.split([3, 8, 1], 1)], 1)
    torch.testing.assert_close(mixed(mixer, hidden, sequences), apart, rtol=1e-5, atol=1e-6)
