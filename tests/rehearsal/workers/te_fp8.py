"""FP8 recipes on ranks that share each sequence (tensor and sequence parallel), at several alignments."""

import os

import te.install

te.install.install()
import functools  # noqa: E402

import torch  # noqa: E402
from rehearse import case, run_cases  # noqa: E402
from small_models import BF16, DENSE, on  # noqa: E402

from megagrpo.config.training_sections import ParallelConfig  # noqa: E402
from megagrpo.models.precision import FP8_RECIPES, Precision  # noqa: E402
from megagrpo.parallel.alignment import token_alignment  # noqa: E402

LENGTHS = (7, 12, 3, 11)  # 50 tokens with their prompts: 25 for each of two ranks
TP = int(os.environ.get("WORLD_SIZE", "1"))


def _update(recipe: str, alignment: int) -> dict[str, float]:
    precision = Precision(torch.bfloat16, *FP8_RECIPES[recipe]) if recipe in FP8_RECIPES else BF16
    return on(lambda it: it.update(1e-4), DENSE, precision, True, alignment, LENGTHS, {"tp": TP})


def _register(recipe: str, name: str, alignment: int) -> None:
    function = functools.partial(_update, recipe, alignment)
    function.__name__ = f"{recipe} {name}"
    case(function)


for RECIPE in ("bf16", "fp8_delayed", "fp8_tensorwise", "fp8_blockwise"):
    _register(RECIPE, "aligned", token_alignment(ParallelConfig(tp=TP, sp=TP > 1), RECIPE))
for RECIPE, TOO_SMALL in (("fp8_delayed", 2), ("fp8_blockwise", 32)):
    _register(RECIPE, "misaligned", TOO_SMALL)

if __name__ == "__main__":
    run_cases()
