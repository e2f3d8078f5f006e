"""What token counts are padded to multiples of. Pure arithmetic."""

import math

from megagrpo.config.schema import ParallelConfig

# tokens of an FP8 GEMM are a multiple of 16; of MXFP8 blocks 32
FP8_ALIGNMENT = {"fp8_delayed": 16, "fp8_tensorwise": 16, "fp8_blockwise": 16, "mxfp8": 32}


def token_alignment(parallel: ParallelConfig, recipe: str) -> int:
    """Return what packed token counts are padded to a multiple of.

    Each of the cp ranks holds two equal chunks, whose tokens together are a multiple of tp where sequence
    parallel and of the FP8 block where FP8.
    """
    chunks, sharded = 2 if parallel.cp > 1 else 1, parallel.tp if parallel.sp else 1
    return parallel.cp * math.lcm(chunks, sharded, FP8_ALIGNMENT.get(recipe, 1))


def sequence_alignment(parallel: ParallelConfig, use_te: bool) -> int:
    """Return what each packed sequence is padded to a multiple of: Transformer Engine cuts every one in 2
    * cp chunks.
    """
    return 2 * parallel.cp if use_te and parallel.cp > 1 else 1
