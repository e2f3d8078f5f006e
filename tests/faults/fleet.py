"""Starts ranks from a warm process and hosts the store that they meet in: what a launcher does, without
its help when a rank fails.
"""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import outside
import psutil
import torch.distributed as dist

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LAUNCHER_SECONDS = 280.0  # with starts that import everything
RUN = (
    "import sys; from megagrpo.supervision.launch import Launch\n"
    "with Launch() as launch: sys.exit(launch.run(sys.argv[2:], int(sys.argv[1]), 1, 'entry'))"
)
LAUNCHERS = {
    "megagrpo run": lambda ranks: ["-c", RUN, str(ranks)],
    "torchrun": lambda ranks: [
        *(
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            f"--nproc-per-node={ranks}",
            "--max-restarts=1",
            "--rdzv-backend=c10d",
        ),
        *("--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", "entry"),
    ],
}
RANK_SECONDS = 150.0  # all ranks have ended by then, or they hang; 5 to 15 s where a rank was lost


def environment() -> dict[str, str]:
    """Return the environment in which the ranks find the package, this folder, and no warnings."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(HERE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True)
class Ended:
    """How the ranks of one launch ended."""

    # exit codes of the ranks, or of the launcher; negative: the signal; "hung": had to be killed
    codes: list[int | str]
    output: str
    notes: list[dict]  # what the injectors noted: faults that were met, rows that were recorded
    left: list[str] = field(default_factory=list)  # what was still there 10 s later, one line each
    peak_bytes: list[int] = field(default_factory=list)  # of the memory of ranks that came to their end


class Fleet:
    """The warm process."""

    def __init__(self, folder: Path):
        """`folder` gets the output of the ranks and the injectors' notes."""
        self.folder, self._count = folder, 0
        self._log = (folder / "server.log").open("w")
        command = [sys.executable, str(HERE / "rank_server.py")]
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(),
            cwd=ROOT,
        )

    def launch(
        self,
        ranks: int,
        arguments: list[str],
        run_dir: Path,
        faults: list[dict],
        launcher: str = "fleet",
        seconds: float = RANK_SECONDS,
        attack: Any = None,
        files: str = outside.OWN_FILES,
    ) -> Ended:
        """Run `megagrpo.train` with `arguments` on `ranks` ranks that meet these faults, and wait until
        all have ended.

        Args:
            files: names in shared memory of which none may be left.
        """
        self._count += 1
        output, notes = self.folder / f"output_{self._count}.txt", self.folder / f"notes_{self._count}.jsonl"
        plan = {"faults": faults, "log": str(notes), "run_dir": str(run_dir)}
        peaks: list[int] = []
        if launcher == "fleet":
            answer = self._fork(
                plan
                | {"ranks": ranks, "arguments": arguments, "output": str(output), "seconds": seconds}
                | {"files": files}
            )
            codes, left, peaks = answer["codes"], answer["left"], answer["peak_bytes"]
        else:
            code, left = self._start(launcher, plan, ranks, arguments, output, attack)
            codes = [code]
        return Ended(codes, output.read_text(), read_notes(notes), left, peaks)

    def _fork(self, request: dict) -> dict:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._server.stdin.write(json.dumps(request | {"port": store.port}) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the rank server ended: {(self.folder / 'server.log').read_text()[-2000:]}")
        return json.loads(answer)

    def _start(
        self, launcher: str, plan: dict, ranks: int, arguments: list[str], output: Path, attack: Any
    ) -> tuple[int | str, list[str]]:
        """Start a real launcher, and wait for it and for ranks that outlive it: they hold its standard
        output.
        """
        path = self.folder / f"plan_{self._count}.json"
        path.write_text(json.dumps(plan))
        command = [sys.executable, *LAUNCHERS[launcher](ranks), *arguments]
        own, files = outside.descendants(), outside.shared_files(outside.OWN_FILES)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment() | {"FAULTS": str(path)},
            start_new_session=True,
        )
        text, struck = None, set()
        try:
            if attack is not None:
                struck = set(attack.strike(psutil.Process(process.pid)))
                process.wait(LAUNCHER_SECONDS)
            else:
                text, _ = process.communicate(timeout=LAUNCHER_SECONDS)
            left = outside.left_behind([*(struck | (outside.descendants() - own))], files, outside.OWN_FILES)
            if text is None:
                text, _ = process.communicate(timeout=LAUNCHER_SECONDS)
        except subprocess.TimeoutExpired:
            for rank in psutil.Process(process.pid).children(recursive=True):
                rank.kill()
            process.kill()
            output.write_text(process.communicate()[0])
            return "hung", []
        output.write_text(text)
        return process.returncode, left

    def close(self) -> None:
        """End the warm process."""
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.close()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._log.close()


def read_notes(path: Path) -> list[dict]:
    """Return what the injectors noted, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
