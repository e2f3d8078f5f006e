"""The quantise stage, between reading slices and sending them: what of a plan's tensors travels as blockwise
float8. Pure.

    scale_b = max(amax_b, 1e-4) / 448,   q = float8_e4m3fn(w * (1 / scale_b))          b: a block of 128 x 128
    of the whole HF tensor

(DeepGEMM's `per_block_cast_to_fp8`, which vLLM quantises with too; 448 is the largest e4m3fn number.) A block
may lie on several ranks.
Only its maximum has to be known on all of them: tensor parallel ranks reduce their maxima of a bucket (1
    float32 for 16,384 elements),
then each quantises the slices that it sends. The bytes that travel are float8, and the same for every layout
of the trainer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megagrpo.models.quantization import is_quantized, scale_name, scale_shape
from megagrpo.weights.sources import SourceTensor

FP8_DTYPE, SCALE_DTYPE = "float8_e4m3fn", "float32"


def quantize_sources(sources: Sequence[SourceTensor]) -> Iterator[SourceTensor]:
    """Yield the tensors of the quantised checkpoint: float8 weights, each followed by its scales, and all
    others.

    Scales are known to all ranks that hold a slice of their weight.
    """
    for source in sources:
        if not is_quantized(source.name):
            yield source
            continue
        yield replace(source, dtype=FP8_DTYPE)
        yield replace(
            source,
            name=scale_name(source.name),
            kind="replicated",
            shape=scale_shape(source.shape),
            split=None,
            split_size=0,
            dtype=SCALE_DTYPE,
        )
