"""Runs that are broken again and again in one folder, and what every fault must come to."""

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleet import Ended, Fleet

TOLD = re.compile(r"^rank \d+ (failed|died|stalled) in ", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """One fault, and what it must come to.

    outcome: `resumes`: the launch ends with an error, told once, and the next one goes on; `stops`: it saves and ends with 0; `goes on`:
    the launch goes on as if nothing had been; `refuses`: the launch ends with a clear error, and nothing in the folder has changed.
    """

    name: str
    outcome: str
    faults: Sequence[dict] = ()
    says: str = ""  # a regular expression that the output must hold
    tamper: Callable[[Path], None] | None = None  # done to the run folder before the launch
    mend: Callable[[Path], None] | None = None  # done to it afterwards
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class Chain:
    """Launches in one run folder, each with its cases: any that go on, and one that ends it."""

    name: str
    ranks: int
    overrides: Sequence[str]
    launches: Sequence[Sequence[Case]]

    @property
    def last_step(self) -> int:
        """The last step that a fault hits."""
        return max(fault["step"] or 0 for cases in self.launches for case in cases for fault in case.faults)


@dataclass
class Result:
    """What a fault came to; the harness's table has one row of it."""

    fault: str
    outcome: str
    recover_seconds: float | None = None  # from the fault to the end of the step that it hit, as far as the run alone decides
    steps_lost: int | None = None
    bit_equal: bool | None = None
    problems: list[str] = field(default_factory=list)

    def row(self) -> dict:
        """Return what is written to the JSON file."""
        return {name: getattr(self, name) for name in ("fault", "outcome", "recover_seconds", "steps_lost", "bit_equal")}


OUTCOMES = {"resumes": "resumed", "stops": "saved and stopped", "goes on": "went on", "refuses": "refused"}


class ChainRun:
    """Runs one chain beside its undisturbed reference."""

    def __init__(self, chain: Chain, fleet: Fleet, folder: Path, config: Sequence[str]):
        self.chain, self.fleet, self.config = chain, fleet, list(config)
        self.reference, self.broken = folder / chain.name / "reference", folder / chain.name / "broken"

    def run(self) -> list[Result]:
        """Return one result per case."""
        whole = self._launch(self.reference, [], [])
        if any(whole.codes):
            raise RuntimeError(f"the reference run of {self.chain.name} ended with {whole.codes}:\n{whole.output[-3000:]}")
        results: list[Result] = []
        waiting: list[tuple[Result, int, float]] = []  # resumed by the next launch: the step that was hit, and the seconds until the end
        for cases in [*self.chain.launches, []]:
            results += self._run_launch(cases, waiting)
        self._compare_whole(results)
        return results

    def _run_launch(self, cases: Sequence[Case], waiting: list[tuple[Result, int, float]]) -> list[Result]:
        for case in cases:
            if case.tamper:
                case.tamper(self.broken)
        before = snapshot(self.broken) if any(case.outcome == "refuses" for case in cases) else {}
        started = time.time()
        overrides = [override for case in cases for override in case.overrides]
        ended = self._launch(self.broken, overrides, [fault for case in cases for fault in case.faults])
        finished = time.time()
        for result, step, seconds in waiting:
            again = self._row_time(ended, step)
            if again is None:
                result.problems.append(f"step {step} was not reached again: {ended.output[-1500:]}")
            else:
                result.recover_seconds = round(seconds + again - started, 1)
        if not any(case.outcome == "refuses" for case in cases):
            waiting.clear()
        results = []
        for case in cases:
            result = Result(f"{self.chain.name}: {case.name}", OUTCOMES[case.outcome])
            results.append(result)
            self._judge(case, result, ended)
            if case.outcome == "refuses":
                if snapshot(self.broken) != before:
                    result.problems.append("the run folder has changed")
                result.steps_lost = 0
            else:
                self._measure(case, result, ended, finished, waiting)
            if case.mend:
                case.mend(self.broken)
        if not cases and any(ended.codes):
            raise RuntimeError(f"the last launch of {self.chain.name} ended with {ended.codes}:\n{ended.output[-3000:]}")
        self._compare_rows(results)
        return results

    def _launch(self, run_dir: Path, overrides: Sequence[str], faults: list[dict]) -> Ended:
        return self.fleet.launch(self.chain.ranks, [*self.config, *self.chain.overrides, f"run.dir={run_dir}", *overrides], run_dir, faults)

    def _judge(self, case: Case, result: Result, ended: Ended) -> None:
        fails = case.outcome in ("resumes", "refuses")
        hung = [rank for rank, code in enumerate(ended.codes) if code == "hung"]
        if hung:
            result.problems.append(f"ranks {hung} had to be killed")
        if case.outcome != "goes on":
            for rank, code in enumerate(ended.codes):
                if (code == 0) == fails and code != "hung":
                    result.problems.append(f"rank {rank} ended with {code}")
            if len(TOLD.findall(ended.output)) > 1 or ended.output.count("Traceback") > 1:
                result.problems.append("the error is told more than once")
        if case.says and not re.search(case.says, ended.output):
            result.problems.append(f"the output does not hold {case.says!r}")
        met = [note for note in ended.notes if note["kind"] == "fault"]
        if case.faults and not any(note["action"] == fault["action"] for note in met for fault in case.faults):
            result.problems.append("the fault was never met")
        if result.problems:
            result.problems.append(f"output:\n{ended.output[-3000:]}")

    def _measure(self, case: Case, result: Result, ended: Ended, finished: float, waiting: list) -> None:
        points = {fault["point"] for fault in case.faults}
        met = [note for note in ended.notes if note["kind"] == "fault" and note["point"] in points]
        if not met:
            return
        at, step = met[0]["time"], met[0]["step"] or 0
        if case.outcome == "goes on":
            again = self._row_time(ended, step)
            result.steps_lost, result.recover_seconds = 0, None if again is None else round(max(0.0, again - at), 1)
            return
        newest = newest_checkpoint(self.broken)
        result.steps_lost = max(0, step - newest)
        waiting.append((result, min(step, newest + 1) if result.steps_lost == 0 else step, finished - at))
        if result.steps_lost == 0:
            result.recover_seconds = 0.0
            waiting.pop()

    def _row_time(self, ended: Ended, step: int) -> float | None:
        return next((note["time"] for note in ended.notes if note["kind"] == "row" and note["row"] >= step), None)

    def _compare_rows(self, results: list[Result]) -> None:
        wanted = {row["step"]: row for row in rows_of(self.reference)}
        for row in rows_of(self.broken):
            if row != wanted.get(row["step"]):
                for result in results:
                    result.problems.append(f"row of step {row['step']} differs from the reference's")
                    result.bit_equal = False
                return

    def _compare_whole(self, results: list[Result]) -> None:
        weights = [(folder / "hf" / "model.safetensors").read_bytes() for folder in (self.reference, self.broken)]
        equal = weights[0] == weights[1] and list(rows_of(self.reference)) == list(rows_of(self.broken))
        for result in results:
            if not equal:
                result.problems.append("the finished run differs from the reference")
            result.bit_equal = equal and result.bit_equal is not False


def rows_of(run_dir: Path) -> list[dict]:
    """Return the metrics of each step, those left out that a fault may change: seconds, and counts of what failed and was mended."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in row.items() if not name.startswith(("time/", "storage/", "checkpoint/"))} for row in rows]


def newest_checkpoint(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint, 0 where there is none."""
    folders = [path for path in (run_dir / "checkpoints").glob("step_*") if path.name[5:].isdigit()]
    return max((int(path.name[5:]) for path in folders), default=0)


def snapshot(run_dir: Path) -> dict[str, bytes]:
    """Return the files that must survive: checkpoints and metrics."""
    files = [*(run_dir / "checkpoints").rglob("*"), run_dir / "metrics.jsonl"]
    return {str(path): path.read_bytes() for path in files if path.is_file()}


def remove(path: Path) -> None:
    """Remove a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
