"""The rank entry of `megagrpo evaluate` and `megagrpo sample`: `python -m megagrpo.generate TASK CONFIG.yaml
[section.field=value ...] [--options JSON]`.

Nothing heavy is imported before the configuration has been read and checked, as in `train.py`.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megagrpo.errors import UserError
from megagrpo.supervision import exit_codes
from megagrpo.supervision.orphaned_files import remove_orphans
from megagrpo.supervision.run_folder import make_run_folder
from megagrpo.supervision.signals import end_with_launcher
from megagrpo.train import start_rank, tell, world_size

if TYPE_CHECKING:
    import torch

    from megagrpo.config.schema import Config
    from megagrpo.supervision.supervisor import Supervisor
    from megagrpo.telemetry.display import Display

TASKS = ("evaluate", "sample")


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says on this rank; return the exit code, as `train.main`."""
    if "RANK" in os.environ:
        end_with_launcher()
    parser = argparse.ArgumentParser(prog="python -m megagrpo.generate")
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--options", type=json.loads, default={}, help="of the task, as JSON")
    chosen = parser.parse_intermixed_args(arguments)
    try:
        _run(chosen.task, chosen.config, chosen.overrides, chosen.options)
    except UserError as error:
        tell(error)
        return exit_codes.USER_ERROR
    return exit_codes.DONE


def _run(task: str, path: str, overrides: Sequence[str], options: dict[str, Any]) -> None:
    from megagrpo.planning.preflight import prepare_run

    config, _ = prepare_run(path, overrides, world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    make_run_folder(Path(config.run.dir))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        remove_orphans()

    def work(
        config: "Config", device: "torch.device", supervisor: "Supervisor", display: "Display | None"
    ) -> None:
        from megagrpo.sampling import TASKS_BY_NAME

        TASKS_BY_NAME[task](config, device, supervisor, display, **options)

    start_rank(config, work)


if __name__ == "__main__":  # the checkpoint reader may spawn a process that imports this module again
    sys.exit(main())
