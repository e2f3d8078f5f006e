"""Attacks from outside: signals at random moments of the start, planted pickles."""

import random
import shutil
import signal
import sys
from pathlib import Path

from chains import Case, Chain, newest_checkpoint
from outside import Signal

sys.path.insert(0, str(Path(__file__).parents[1]))

from planted_pickles import KINDS

from megagrpo.checkpoint.manifest import read_manifest, record_file, write_manifest

START_SECONDS = 14.0  # of a start on a busy machine: moments are drawn from it


def struck(number: signal.Signals, seed: int) -> list[Case]:
    after = random.Random(seed).uniform(0.3, START_SECONDS)
    return [
        Case(
            f"{number.name} {after:.1f} s after the start",
            "ends",
            launcher="megagrpo run",
            attack=Signal(number, after),
        )
    ]


def planted(kind: str) -> list[Case]:
    """A payload in the newest checkpoint, with a manifest that fits it."""

    def tamper(run_dir: Path) -> None:
        checkpoint = newest(run_dir)
        shutil.copytree(checkpoint, run_dir / "kept")
        KINDS[kind](checkpoint, run_dir / "ran")
        manifest = read_manifest(checkpoint)
        files = [record_file(checkpoint, each.name) for each in manifest.files]
        write_manifest(checkpoint, type(manifest)(**{**vars(manifest), "files": files}))

    def mend(run_dir: Path) -> None:
        checkpoint = newest(run_dir)
        shutil.rmtree(checkpoint)
        (run_dir / "kept").rename(checkpoint)

    def leaves(run_dir: Path) -> str | None:
        return "the payload ran" if (run_dir / "ran").exists() else None

    return [
        Case(
            f"a pickle planted in {kind}",
            "refuses",
            says=r"checkpoints/step_\d+\S*: not (read|what a save writes): .*",
            tamper=tamper,
            mend=mend,
            leaves=leaves,
        )
    ]


def newest(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step_{newest_checkpoint(run_dir):06d}"


ATTACKS = Chain(
    "attacks",
    2,
    ["parallel.tp=2"],
    [
        [
            Case(
                "killed, to have a checkpoint",
                "resumes",
                [{"point": "update.enter", "action": "kill", "step": 2, "rank": 1}],
            )
        ],
        *(planted(kind) for kind in KINDS),
        *(
            struck(number, seed)
            for seed, number in enumerate(
                (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL, signal.SIGKILL)
            )
        ),
    ],
)
