"""The enums of the compiled binding (2.11.0): names, and the values where they are not 0, 1, 2, .."""

import enum

import torch

DTYPES = {
    "kByte": torch.uint8,
    "kInt32": torch.int32,
    "kFloat32": torch.float32,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
    "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
    "kFloat4E2M1": torch.uint8,
}
_MASKS = "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK"
_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD "
    "T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
    "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
    "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD"
)


def _nvte(names: str) -> list[str]:
    return [f"NVTE_{name}" for name in names.split()]


_NAMES = {
    "DType": list(DTYPES),
    "NVTE_Bias_Type": _nvte("NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI"),
    "NVTE_Mask_Type": _nvte(f"{_MASKS} PADDING_CAUSAL_BOTTOM_RIGHT_MASK"),
    "NVTE_Softmax_Type": _nvte("VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX"),
    "NVTE_QKV_Format": _nvte("BSHD SBHD THD SBHD_2BSHD BSHD_2SBHD THD_2BSHD THD_2SBHD"),
    "NVTE_QKV_Layout": _nvte(_LAYOUTS),
    "NVTE_Fused_Attn_Backend": _nvte("F16_max512_seqlen F16_arbitrary_seqlen FP8 No_Backend"),
    "Float8BlockScaleTensorFormat": ["GEMM_READY", "COMPACT"],
    "CommOverlapType": ["RS", "AG"],
    "FP8FwdTensors": [f"GEMM{i}_{kind}" for i in (1, 2, 3) for kind in ("INPUT", "WEIGHT", "OUTPUT")],
    "FP8BwdTensors": [f"GRAD_{kind}{i}" for i in (1, 2, 3) for kind in ("OUTPUT", "INPUT")],
}
_VALUES = {
    "DType": (0, 2, 4, 5, 6, 7, 8, 10),
    "NVTE_QKV_Format": (1, 0, 2, 4, 3, 5, 6),
    "NVTE_Fused_Attn_Backend": (0, 1, 2, -1),
}
ENUMS = {
    name: enum.IntEnum(name, list(zip(names, _VALUES.get(name, range(len(names))), strict=True)))
    for name, names in _NAMES.items()
}
