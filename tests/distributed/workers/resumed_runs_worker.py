"""Worker: several runs in one launch, some of which are refused. Argument: JSON {name: [config file, overrides]}.

The first rank prints `OUTCOME {name: message}` for each that is refused, with the same UserError on all ranks.
"""

import json
import sys

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import torch.distributed as dist  # noqa: E402

from megagrpo.config.load import load_config  # noqa: E402
from megagrpo.errors import UserError  # noqa: E402
from megagrpo.parallel.groups import all_gather_metadata, destroy_groups  # noqa: E402
from megagrpo.trainer import run_training  # noqa: E402


def main() -> None:
    for name, (path, overrides) in json.loads(sys.argv[1]).items():
        try:
            run_training(load_config(path, overrides), DEVICE)
        except UserError as error:
            told = all_gather_metadata(str(error))
            assert len(set(told)) == 1, told
            if dist.get_rank() == 0:
                print("OUTCOME", json.dumps({name: told[0]}), flush=True)
            destroy_groups()


if __name__ == "__main__":
    main()
