"""The command line of both conversions, shared by `tools/convert_*.py` and `megagrpo convert`. Imports no
torch by itself.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Literal

from megagrpo.device.launch import set_thread_environment
from megagrpo.errors import UserError

Direction = Literal["hf-to-megatron", "megatron-to-hf"]
EXIT_USER_ERROR = 2


def convert(direction: Direction, source: str, target: str, tp: int = 1, pp: int = 1) -> None:
    """Set this process up and convert; see `checkpoint.hf`."""
    set_thread_environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    from megagrpo.checkpoint.hf import convert_hf_to_megatron, convert_megatron_to_hf

    (convert_hf_to_megatron if direction == "hf-to-megatron" else convert_megatron_to_hf)(
        source, target, tp, pp
    )


def main(direction: Direction, description: str, arguments: Sequence[str] | None = None) -> int:
    """Parse SOURCE TARGET [--tp N] [--pp N], convert, and return the exit code: 2 with one line for a
    mistake.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("source")
    parser.add_argument("target", help="a folder that does not exist yet")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size, under torchrun")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size, under torchrun")
    options = parser.parse_args(arguments)
    try:
        convert(direction, options.source, options.target, options.tp, options.pp)
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"{options.target} written")
    return 0
