"""Worker: several runs in one launch, some of which are refused. Argument: JSON {name: [config file,
overrides]}.

Before a run whose name begins with `other_generators` the process-wide random generators are put elsewhere.
The first rank prints `OUTCOME {name: message}` for each run that is refused, with the same UserError on all
ranks.
"""

import json
import os
import random
import sys

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from megagrpo.config.load import load_config  # noqa: E402
from megagrpo.errors import UserError  # noqa: E402
from megagrpo.parallel.groups import all_gather_metadata, destroy_groups  # noqa: E402
from megagrpo.run import run_training  # noqa: E402


def main() -> None:
    for name, (path, overrides) in json.loads(sys.argv[1]).items():
        if name.startswith("other_generators"):
            random.seed(1)
            np.random.seed(2)
            torch.manual_seed(3 + int(os.environ["RANK"]))
        try:
            run_training(load_config(path, overrides), DEVICE)
        except UserError as error:
            told = all_gather_metadata(str(error))
            assert len(set(told)) == 1, told
            if dist.get_rank() == 0:
                print(f"OUTCOME {json.dumps({name: told[0]})}\n", end="", flush=True)
            destroy_groups()


if __name__ == "__main__":
    main()
