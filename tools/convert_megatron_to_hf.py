"""Write a Megatron distributed checkpoint (of a run, or a converted one) as a Hugging Face folder.

Usage: python tools/convert_megatron_to_hf.py SOURCE TARGET [--tp N] [--pp N]
           [--dtype source|float32|bfloat16] [model.overrides.FIELD=VALUE ...] [model.ignore_fields=[FIELD]]
For models larger than one process's memory start it with torchrun.
"""

import sys

from megagrpo.checkpoint.convert_command import main

if __name__ == "__main__":
    sys.exit(main("megatron-to-hf", __doc__.splitlines()[0]))
