"""`python -m megagrpo.train` with faults, for launchers that start the ranks themselves: FAULTS names a
JSON file of `faults` and `log`.
"""

import json
import os
import sys
from pathlib import Path

import megagrpo.train
from megagrpo.supervision.signals import end_with_launcher


def main() -> int:
    end_with_launcher()  # as megagrpo.train does, before anything slow is imported
    from megagrpo.device import environment

    environment.set_thread_environment(int(os.environ["LOCAL_WORLD_SIZE"]))
    environment.set_thread_environment = lambda ranks: None  # what is wrapped next loads torch
    from megagrpo.device import device

    device.setup()
    import inject

    plan = json.loads(Path(os.environ["FAULTS"]).read_text())
    inject.install(plan["faults"], Path(plan["log"]), Path(plan["run_dir"]))
    return megagrpo.train.main()


if __name__ == "__main__":
    sys.exit(main())
