"""Worker: several whole training runs in one launch. Argument: a JSON list of [config file, [override,
...]].
"""

import json
import sys

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

from megagrpo.config.load import load_config  # noqa: E402
from megagrpo.run import run_training  # noqa: E402


def main() -> None:
    for path, overrides in json.loads(sys.argv[1]):
        run_training(load_config(path, overrides), DEVICE)


if __name__ == "__main__":
    main()
