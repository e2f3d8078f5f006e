"""The command line of both conversions, shared by `tools/convert_*.py` and `megagrpo convert`. Imports no
torch by itself.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, Literal, get_args

from megagrpo.config.load import apply_override
from megagrpo.config.run_sections import ExportDtype
from megagrpo.config.training_sections import ModelConfig
from megagrpo.device.environment import set_thread_environment
from megagrpo.errors import UserError

Direction = Literal["hf-to-megatron", "megatron-to-hf"]
EXIT_USER_ERROR = 2


def convert(
    direction: Direction,
    source: str,
    target: str,
    overrides: Sequence[str] = (),
    *,
    tp: int = 1,
    pp: int = 1,
    dtype: ExportDtype = "source",
) -> None:
    """Set this process up and convert; see `checkpoint.hf`.

    Args:
        overrides: `model.family=...`, `model.ignore_fields=[...]` and `model.overrides.FIELD=VALUE`, as
            those of a run.
    """
    model = _read_model(source, overrides)
    set_thread_environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    from megagrpo.checkpoint.hf import convert_hf_to_megatron, convert_megatron_to_hf

    (convert_hf_to_megatron if direction == "hf-to-megatron" else convert_megatron_to_hf)(
        model, target, tp, pp, dtype
    )


def _read_model(source: str, overrides: Sequence[str]) -> ModelConfig:
    raw: dict[str, Any] = {"model": {"path": source}}
    for override in overrides:
        if not override.startswith(("model.family=", "model.ignore_fields=", "model.overrides")):
            raise UserError(
                f"{override}: a conversion takes model.family, model.ignore_fields and model.overrides"
            )
        apply_override(raw, override)
    return ModelConfig.model_validate(raw["model"])


def main(direction: Direction, description: str, arguments: Sequence[str] | None = None) -> int:
    """Parse SOURCE TARGET [--tp N] [--pp N] [--dtype ...] [model.overrides.FIELD=VALUE ...], convert, and
    return the exit code: 2 with one line for a mistake.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("source")
    parser.add_argument("target", help="a folder that does not exist yet")
    parser.add_argument(
        "overrides",
        nargs="*",
        help="model.ignore_fields=[NAME], model.overrides.NAME=VALUE; model.family=FILE.py:CLASS",
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(ExportDtype),
        default="source",
        help="of the weights that are written, and in the config.json beside them",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size, under torchrun")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size, under torchrun")
    options = parser.parse_intermixed_args(arguments)
    try:
        convert(
            direction,
            options.source,
            options.target,
            options.overrides,
            tp=options.tp,
            pp=options.pp,
            dtype=options.dtype,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"{options.target} written")
    return 0
