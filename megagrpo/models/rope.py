"""Rotary position embedding by position id, as the Hugging Face families compute it.

Megatron's own module knows positions 0..S-1 of one sequence or of each packed sequence. A prompt that is
shared by several completions needs the positions of each token instead, and Llama 3's scaling needs all its
parameters, not only the factor.
"""

import math
from typing import Any

import torch

from megagrpo.models.family import HFConfig


def inverse_frequencies(hf: HFConfig) -> torch.Tensor:
    """Return the rotary inverse frequencies, float32 [rotary_dim / 2].

    `default`: theta^(-2i/d) (Su et al. 2021, arXiv 2104.09864, Eq. 15). `linear`: divided by `factor`.
    `llama3`: low frequencies are divided by `factor`, high ones kept, those between interpolated (Llama 3.1
    reference implementation). `yarn`: as llama3, with a ramp over the dimensions between the bounds
    `beta_fast` and `beta_slow`, in rotations over the original context (Peng et al. 2023, arXiv 2309.00071,
    sections 3.2 and 3.3).
    """
    exponents = torch.arange(0, hf.rotary_dim, 2, dtype=torch.int64).float() / hf.rotary_dim
    frequencies = 1.0 / hf.rope_theta**exponents
    parameters = hf.rope_parameters
    if hf.rope_type == "default":
        return frequencies
    if hf.rope_type == "linear":
        return frequencies / parameters["factor"]
    if hf.rope_type == "yarn":
        interpolated_share = _yarn_ramp(hf)
        return frequencies / parameters["factor"] * interpolated_share + frequencies * (
            1 - interpolated_share
        )
    factor, low, high = parameters["factor"], parameters["low_freq_factor"], parameters["high_freq_factor"]
    original = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    interpolated = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(between, interpolated, scaled)


def _yarn_ramp(hf: HFConfig) -> torch.Tensor:
    """Return how far each frequency is interpolated, 0 to 1, float32 [rotary_dim / 2]."""
    parameters, dim = hf.rope_parameters, hf.rotary_dim
    original = parameters["original_max_position_embeddings"]

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(hf.rope_theta))

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return by how much YaRN scales the attention's logits, as a root (arXiv 2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_scale(hf: HFConfig) -> float:
    """Return the factor of the cosines and sines: 1 but for `yarn`."""
    parameters = hf.rope_parameters
    if hf.rope_type != "yarn":
        return 1.0
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    factor, mscale, all_dim = (parameters.get(key) for key in ("factor", "mscale", "mscale_all_dim"))
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


class PositionedRotaryEmbedding(torch.nn.Module):
    """Takes the place of `GPTModel.rotary_pos_emb`: angles for the position ids that the packed input
    carries.
    """

    def __init__(self, hf: HFConfig, device: torch.device):
        super().__init__()
        # no buffer: a cast of the model to bf16 must not round it
        self.inverse_frequencies = inverse_frequencies(hf).to(device)

    def get_rotary_seq_len(
        self, inference_context: Any, transformer: Any, transformer_input: Any, config: Any, packed: Any
    ) -> torch.Tensor:
        """Return the position ids of the micro-batch; Megatron hands the result to `forward`.

        [T] for packed trees; 0..S-1 for Transformer Engine's `thd`, whose kernels restart them at each
        sequence themselves.
        """
        if packed.qkv_format == "thd":
            return torch.arange(packed.max_seqlen_q, device=self.inverse_frequencies.device)
        return packed.rotary_positions

    def forward(
        self, positions: torch.Tensor, packed_seq: bool = False, cp_group: Any = None
    ) -> torch.Tensor:
        """Return the angles [T, 1, 1, rotary_dim], float32, both halves alike."""
        angles = torch.outer(positions.to(self.inverse_frequencies), self.inverse_frequencies)
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]
