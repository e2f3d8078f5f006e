"""Starts ranks from a warm process and hosts the store that they meet in: what a launcher does, without its help when a rank fails."""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RANK_SECONDS = 60.0  # all ranks have ended by then, or they hang; 5 to 15 s where a rank was lost


def environment() -> dict[str, str]:
    """Return the environment in which the ranks find the package, this folder, and no warnings."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(HERE), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True)
class Ended:
    """How the ranks of one launch ended."""

    codes: list[int | str]  # exit codes; negative: the signal; "hung": had to be killed
    seconds: list[float]  # from the start, by rank
    output: str
    notes: list[dict]  # what the injectors noted: faults that were met, rows that were recorded


class Fleet:
    """The warm process."""

    def __init__(self, folder: Path):
        """`folder` gets the output of the ranks and the injectors' notes."""
        self.folder, self._count = folder, 0
        self._log = (folder / "server.log").open("w")
        command = [sys.executable, str(HERE / "rank_server.py")]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment(), cwd=ROOT
        )

    def launch(self, ranks: int, arguments: list[str], run_dir: Path, faults: list[dict], seconds: float = RANK_SECONDS) -> Ended:
        """Run `megagrpo.train` with `arguments` on `ranks` ranks that meet these faults, and wait until all have ended."""
        self._count += 1
        output, notes = self.folder / f"output_{self._count}.txt", self.folder / f"notes_{self._count}.jsonl"
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        request = {"ranks": ranks, "port": store.port, "arguments": arguments, "faults": faults, "seconds": seconds}
        request |= {"log": str(notes), "run_dir": str(run_dir), "output": str(output)}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the rank server ended: {(self.folder / 'server.log').read_text()[-2000:]}")
        return Ended(**json.loads(answer), output=output.read_text(), notes=read_notes(notes))

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
