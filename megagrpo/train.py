"""The torchrun entry: `torchrun --nproc-per-node N -m megagrpo.train CONFIG.yaml [section.field=value ...]
[--dry-run]`.

Nothing heavy is imported before the configuration has been read and checked: a mistake costs a second, and
the thread settings of a rank can only be made before torch is loaded.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megagrpo.config.dashed_overrides import refuse_dashed_overrides
from megagrpo.errors import UserError
from megagrpo.supervision import exit_codes
from megagrpo.supervision.failure import note_for_launcher
from megagrpo.supervision.orphaned_files import remove_orphans
from megagrpo.supervision.redaction import redact
from megagrpo.supervision.run_folder import make_run_folder
from megagrpo.supervision.signals import end_with_launcher

if TYPE_CHECKING:
    import torch

    from megagrpo.config.schema import Config
    from megagrpo.supervision.supervisor import Supervisor
    from megagrpo.telemetry.display import Display

GRACE_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says on this rank; return the exit code.

    The codes are those of `supervision/exit_codes.py`. A run that fails on the way leaves from here and does
    not return: threads of collectives that lost their peers could keep the process from ending.
    """
    if "RANK" in os.environ:
        end_with_launcher()
    try:
        refuse_dashed_overrides(sys.argv[1:] if arguments is None else arguments)
        _run(parse_arguments(arguments))
    except UserError as error:
        tell(error)
        return exit_codes.USER_ERROR
    return exit_codes.DONE


def tell(error: UserError) -> None:
    """Print a mistake that was found before the ranks have met, once for all ranks.

    torchrun ends all ranks when the first one leaves. So the others give rank 0 time to print what all of
    them have found; one that is still there after that met something that rank 0 did not, and prints it under
    its own name.
    """
    text = redact(str(error))
    if rank() == 0:
        note_for_launcher(text)
        print(text, file=sys.stderr, flush=True)
        return
    time.sleep(GRACE_SECONDS)
    note_for_launcher(text)
    print("\n".join(f"rank {rank()}: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return config, overrides, dry_run and world_size. A malformed command line leaves with code 2 and
    the usage.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megagrpo.train", description="Train one run. Started on every rank by torchrun."
    )
    parser.add_argument("config", help="YAML file of the run")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="values that win over the file"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="open all inputs, say what the run would do; build nothing",
    )
    parser.add_argument(
        "--world-size", type=_positive, help="ranks that a dry run plans for; default: WORLD_SIZE, or 1"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.world_size is not None and not options.dry_run:
        parser.error("--world-size is for --dry-run; a run has the ranks that torchrun started")
    return options


def rank() -> int:
    """Return this process's rank as torchrun set it; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _run(options: argparse.Namespace) -> None:
    from megagrpo.planning.preflight import prepare_run

    config, num_ranks = prepare_run(
        options.config,
        options.overrides,
        options.world_size or world_size(),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    if options.dry_run:
        from megagrpo.planning.dry_run import print_dry_run

        if rank() == 0:
            print_dry_run(config, num_ranks)
        return
    make_run_folder(Path(config.run.dir))
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        remove_orphans()
    start_rank(config, _train)


def _train(
    config: "Config", rank_device: "torch.device", supervisor: "Supervisor", display: "Display | None"
) -> None:
    from megagrpo.run import run_training

    run_training(config, rank_device, supervisor, display)


def start_rank(
    config: "Config", work: "Callable[[Config, torch.device, Supervisor, Display | None], None]"
) -> None:
    """Do this rank's part of `work`; whatever ends it early is told once for all ranks.

    Args:
        work: it imports what is heavy itself: the imports belong to what is watched.
    """
    from megagrpo.device import device

    rank_device = device.setup()  # before anything imports megatron.core

    from megagrpo.supervision.board import open_board
    from megagrpo.supervision.processes import leave_now
    from megagrpo.supervision.supervisor import Supervisor
    from megagrpo.telemetry.activity import Activity
    from megagrpo.telemetry.display import Display

    display = Display(Activity(config.run.steps)) if rank() == 0 else None
    supervisor = Supervisor(Path(config.run.dir), config.watchdog, rank(), world_size())
    try:
        supervisor.start(open_board())
        work(config, rank_device, supervisor, display)
        supervisor.finish()
    except Exception as error:
        if display is not None:
            display.close()
        leave_now(supervisor.fail(error))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number


if __name__ == "__main__":  # the checkpoint writer spawns a process that imports this module again
    sys.exit(main())
