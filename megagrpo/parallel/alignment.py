"""What token counts are padded to multiples of. Pure arithmetic."""

import math

from megagrpo.config.training_sections import ParallelConfig

# Tokens that an FP8 GEMM of ONE rank takes are a multiple of 16; of MXFP8's blocks 32. Transformer Engine
# looks at the tensor that the rank holds (`assert_dim_for_fp8_exec`): at its sequence parallel share.
FP8_ALIGNMENT = {"fp8_delayed": 16, "fp8_tensorwise": 16, "fp8_blockwise": 16, "mxfp8": 32}
# Under sequence parallel a rank's share is cast before the all-gather: whole blocks of 128 rows of it
# (`assert_dim_for_all_gather`).
SHARED_BLOCK = {"fp8_blockwise": 128}


def token_alignment(parallel: ParallelConfig, recipe: str) -> int:
    """Return what packed token counts are padded to a multiple of.

    Each of the cp ranks holds two equal chunks, whose tokens together make whole FP8 blocks on a tp rank: of
    all of them, or of its share where sequence parallel.
    """
    unit, chunks = FP8_ALIGNMENT.get(recipe, 1), 2 if parallel.cp > 1 else 1
    if parallel.sp:
        unit = parallel.tp * SHARED_BLOCK.get(recipe, unit)
    return parallel.cp * math.lcm(chunks, unit)


def sequence_alignment(parallel: ParallelConfig, use_te: bool) -> int:
    """Return what each packed sequence is padded to a multiple of: Transformer Engine cuts every one in 2
    * cp chunks.
    """
    return 2 * parallel.cp if use_te and parallel.cp > 1 else 1
