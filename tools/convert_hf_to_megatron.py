"""Write a Hugging Face folder as a Megatron distributed checkpoint, readable in any parallel layout.

Usage: python tools/convert_hf_to_megatron.py SOURCE TARGET [--tp N] [--pp N]
           [--dtype source|float32|bfloat16] [model.overrides.FIELD=VALUE ...] [model.ignore_fields=[FIELD]]
For models larger than one process's memory start it with torchrun.
"""

import sys

from megagrpo.checkpoint.convert_command import main

if __name__ == "__main__":  # the checkpoint writer spawns a process that imports this module again
    sys.exit(main("hf-to-megatron", __doc__.splitlines()[0]))
