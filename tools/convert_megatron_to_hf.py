"""Write a Megatron distributed checkpoint (of a run, or a converted one) as a Hugging Face folder.

Usage: python tools/convert_megatron_to_hf.py SOURCE TARGET [--tp N] [--pp N]
For models larger than one process's memory start it with torchrun.
"""

import argparse
import os
import sys

from megagrpo.device.launch import set_thread_environment
from megagrpo.errors import UserError


def main() -> int:
    """Convert; exit code 2 with one line for a mistake."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size, under torchrun")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel size, under torchrun")
    options = parser.parse_args()
    set_thread_environment(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    from megagrpo.checkpoint.hf import convert_megatron_to_hf

    try:
        convert_megatron_to_hf(options.source, options.target, options.tp, options.pp)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options.target} written")
    return 0


if __name__ == "__main__":  # the checkpoint writer spawns a process that imports this module again
    sys.exit(main())
