"""Worker: one training run of which one rank is killed (SIGKILL) at a named point of a step.

Arguments: JSON of [config file, overrides], point, step.
"""

import json
import os
import signal
import sys

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

from megagrpo.checkpoint import folder as checkpoint_folder  # noqa: E402
from megagrpo.checkpoint.writer import ShardWriter  # noqa: E402
from megagrpo.config.load import load_config  # noqa: E402
from megagrpo.engines.embedded.transformers_engine import TransformersEngine  # noqa: E402
from megagrpo.policy.actor import Actor  # noqa: E402
from megagrpo.rewards.pool import RewardPool  # noqa: E402
from megagrpo.rollout.generation import RolloutGenerator  # noqa: E402
from megagrpo.run import run_training  # noqa: E402
from megagrpo.trainer import Trainer  # noqa: E402

POINT, STEP = sys.argv[2], int(sys.argv[3])
# only the first rank publishes a checkpoint
VICTIM = {"publish_checkpoint": 0}.get(POINT, int(os.environ["WORLD_SIZE"]) - 1)
running = {"step": 0}


def in_step(*_, **__) -> bool:
    return running["step"] == STEP


def in_refill(_, request) -> bool:
    return in_step() and request.first_index > 0


def writes_step(writer) -> bool:
    return writer.folder.name.startswith(f"step_{STEP:06d}")


def has_step(folder) -> bool:
    return (folder / f"step_{STEP:06d}").is_dir()


def around(owner, name, condition=in_step, before=True) -> None:
    """Kill where a function is called, or where it has done its work on this rank."""
    original = getattr(owner, name)

    def wrapped(*arguments, **options):
        if before and condition(*arguments, **options):
            kill()
        result = original(*arguments, **options)
        if not before and condition(*arguments, **options):
            kill()
        return result

    setattr(owner, name, wrapped)


def kill() -> None:
    if int(os.environ["RANK"]) == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)


POINTS = {
    "generation": lambda: around(TransformersEngine, "generate"),
    "refill": lambda: around(RolloutGenerator, "generate", in_refill),
    "scoring": lambda: around(RewardPool, "submit"),
    # the first of two updates of the step is applied
    "update": lambda: around(Actor, "apply_gradients", before=False),
    "publish": lambda: around(TransformersEngine, "load", before=False),
    # its part is not on disk, and never will be
    "write_shards": lambda: around(ShardWriter, "write", writes_step),
    # its part is on disk: the others bring the save to its end
    "shards_written": lambda: around(ShardWriter, "write", writes_step, before=False),
    # renamed, and `latest` not yet moved
    "publish_checkpoint": lambda: around(checkpoint_folder, "point_latest", has_step),
}


def main() -> None:
    original = Trainer._step

    def step(self) -> None:
        running["step"] = self.state.step + 1
        original(self)

    Trainer._step = step
    POINTS[POINT]()
    path, overrides = json.loads(sys.argv[1])
    run_training(load_config(path, overrides), DEVICE)


if __name__ == "__main__":
    main()
