"""Runs that are broken again and again in one folder, and what every fault must come to."""

import json
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import outside
from fake_engine import FakeEngine
from fleet import RANK_SECONDS, Ended, Fleet

TOLD = re.compile(r"^rank \d+ (failed|died|stalled) in ", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """One fault, and what it must come to.

    outcome: `resumes`: the launch ends with an error, told once, and the next one goes on; `stops`: it saves
    and ends with 0; `goes on`: the launch goes on as if nothing had been; `restarts`: the launcher starts the
    ranks again; `refuses`: the launch ends with a clear error, and nothing in the folder has changed; `ends`:
    attacked from outside, it ends with 0 or with one clear line, and nothing of it is left.
    """

    name: str
    outcome: str
    faults: Sequence[dict] = ()
    says: str = ""  # a regular expression that the output must hold
    tamper: Callable[[Path], None] | None = None  # done to the run folder before the launch
    mend: Callable[[Path], None] | None = None  # done to it afterwards
    # says what the launch has left behind and should not have
    leaves: Callable[[Path], str | None] | None = None
    overrides: Sequence[str] = ()  # RUN_DIR stands for the run folder
    # or `megagrpo run`, `torchrun`: those that real runs are started with, restarts allowed
    launcher: str = "fleet"
    # exit codes of the launch, where they are not 0 or an error's by the outcome
    codes: Sequence[int] | None = None
    attack: Any = None  # of outside.py; by a launcher that real runs are started with
    growth_mib: float | None = None  # of a rank's largest memory over the reference's, at most


@dataclass(frozen=True)
class Chain:
    """Launches in one run folder, each with its cases: any that go on, and one that ends it.

    Where all cases of the last launch go on, that one finishes the run; else one more does.
    """

    name: str
    ranks: int
    overrides: Sequence[str]
    launches: Sequence[Sequence[Case]]
    needs: str | None = None  # a file without which the chain is skipped
    seconds: float = RANK_SECONDS  # that the ranks of a launch have
    fake_engines: int = 0  # servers of fake_engine.py, which the ranks generate through

    @property
    def last_step(self) -> int:
        """The last step that a fault hits."""
        return (
            max(fault.get("step") or 0 for cases in self.launches for case in cases for fault in case.faults)
            or 1
        )


@dataclass
class Result:
    """What a fault came to; the harness's table has one row of it."""

    fault: str
    outcome: str
    # from the fault to the end of the step that it hit, as far as the run alone decides
    recover_seconds: float | None = None
    steps_lost: int | None = None
    bit_equal: bool | None = None
    problems: list[str] = field(default_factory=list)

    def row(self) -> dict:
        """Return what is written to the JSON file."""
        return {
            name: getattr(self, name)
            for name in ("fault", "outcome", "recover_seconds", "steps_lost", "bit_equal")
        }


OUTCOMES = {
    "resumes": "resumed",
    "stops": "saved and stopped",
    "goes on": "went on",
    "restarts": "restarted",
    "refuses": "refused",
    "ends": "ended",
}
GOES_ON = ("goes on", "restarts")
# seconds; what failed, was mended, or sent to whom
MAY_CHANGE = ("time/", "storage/", "checkpoint/", "publish/", "rollout/lost_replicas")


class ChainRun:
    """Runs one chain beside its undisturbed reference."""

    def __init__(self, chain: Chain, fleet: Fleet, folder: Path, config: Sequence[str]):
        self.chain, self.fleet, self.config = chain, fleet, list(config)
        self.reference, self.broken = folder / chain.name / "reference", folder / chain.name / "broken"
        self.engines = [FakeEngine(number) for number in range(chain.fake_engines)]

    def run(self) -> list[Result]:
        """Return one result per case."""
        try:
            return self._run()
        finally:
            for engine in self.engines:
                engine.close()

    def _run(self) -> list[Result]:
        whole = self._launch(self.reference, [], [])
        self._peak_bytes = max(whole.peak_bytes, default=0)
        if any(whole.codes):
            raise RuntimeError(
                f"the reference run of {self.chain.name} ended with {whole.codes}:\n{whole.output[-3000:]}"
            )
        results: list[Result] = []
        # resumed by the next launch: the step that was hit, and the seconds until the end
        waiting: list[tuple[Result, int, float]] = []
        finishes = all(case.outcome == "goes on" for case in self.chain.launches[-1])
        for number, cases in enumerate([*self.chain.launches, *([] if finishes else [[]])], start=1):
            results += self._run_launch(cases, waiting, is_last=number > len(self.chain.launches) - finishes)
        self._compare_whole(results)
        return results

    def _run_launch(
        self, cases: Sequence[Case], waiting: list[tuple[Result, int, float]], is_last: bool
    ) -> list[Result]:
        had = newest_checkpoint(self.broken)
        for case in cases:
            if case.tamper:
                case.tamper(self.broken)
        refuses = any(case.outcome == "refuses" for case in cases)
        before = snapshot(self.broken) if refuses else {}
        started = time.time()
        overrides = [override for case in cases for override in case.overrides]
        faults = [fault for case in cases for fault in case.faults]
        launcher = next((case.launcher for case in cases), "fleet")
        attack = next((case.attack for case in cases if case.attack), None)
        ended = self._launch(self.broken, overrides, faults, launcher, attack)
        span = (started, time.time())
        if is_last and any(ended.codes):
            raise RuntimeError(
                f"the last launch of {self.chain.name} ended with {ended.codes}:\n{ended.output[-3000:]}"
            )
        if not refuses and attack is None:  # one that is attacked may end at its start
            self._measure_recovery(ended, started, waiting)
        results = []
        for case in cases:
            result = Result(f"{self.chain.name}: {case.name}", OUTCOMES[case.outcome])
            results.append(result)
            self._judge(case, result, ended)
            if refuses:
                result.steps_lost = 0
                result.problems += ["the run folder has changed"] if snapshot(self.broken) != before else []
            else:
                self._measure(case, result, ended, span, had, waiting)
            if case.mend:
                case.mend(self.broken)
        self._compare_rows(results)
        return results

    def _launch(
        self,
        run_dir: Path,
        overrides: Sequence[str],
        faults: list[dict],
        launcher: str = "fleet",
        attack: Any = None,
    ) -> Ended:
        named = [override.replace("RUN_DIR", str(run_dir)) for override in overrides]
        arguments = [*self.config, *self.chain.overrides, f"run.dir={run_dir}", *named]
        if self.engines:
            addresses = ",".join(engine.address for engine in self.engines)
            arguments.append(f"engine.server.addresses=[{addresses}]")
        for engine in self.engines:
            engine.begin(faults)
        ended = self.fleet.launch(
            self.chain.ranks,
            arguments,
            run_dir,
            faults,
            launcher,
            self.chain.seconds,
            attack,
            outside.OWN_FILES if self.chain.needs is None else outside.ALL_FILES,
        )
        notes = [note for engine in self.engines for note in engine.notes]
        left = [f"{engine.address} is still connected" for engine in self.engines if engine.is_connected()]
        return replace(ended, notes=[*ended.notes, *notes], left=[*ended.left, *left])

    def _judge(self, case: Case, result: Result, ended: Ended) -> None:
        if "hung" in ended.codes:
            result.problems.append(f"a rank had to be killed: {ended.codes}")
        if case.codes is not None and ended.codes != list(case.codes):
            result.problems.append(f"the launch ended with {ended.codes}")
        elif case.outcome == "ends":
            killed = -signal.SIGKILL in ended.codes  # a launcher that can say nothing
            is_told = any(line.startswith("stopped by ") for line in ended.output.splitlines())
            if "Traceback" in ended.output or not (killed or is_told or ended.codes == [0]):
                result.problems.append(f"the launch ended with {ended.codes}, without a clear line")
        elif case.outcome not in GOES_ON and case.codes is None:
            if any((code == 0) != (case.outcome == "stops") for code in ended.codes):
                result.problems.append(f"the ranks ended with {ended.codes}")
            if len(TOLD.findall(ended.output)) > 1 or ended.output.count("Traceback") > 1:
                result.problems.append("the error is told more than once")
        result.problems += ended.left
        if self.engines and "Traceback" in ended.output:
            result.problems.append("a traceback is printed")
        if case.growth_mib is not None:
            grown = (max(ended.peak_bytes) - self._peak_bytes) / 2**20
            if grown > case.growth_mib:
                result.problems.append(f"a rank's memory grew by {grown:.0f} MiB")
        if case.says and not re.search(case.says, ended.output):
            result.problems.append(f"the output does not hold {case.says!r}")
        met = {(note["point"], note["action"]) for note in self._met(case, ended)}
        if {(fault["point"], fault["action"]) for fault in case.faults if not fault.get("never")} - met:
            result.problems.append("the fault was never met")
        if case.leaves and (left := case.leaves(self.broken)):
            result.problems.append(left)
        if result.problems:
            result.problems.append(f"output:\n{ended.output[-3000:]}")

    def _met(self, case: Case, ended: Ended) -> list[dict]:
        kinds = {(fault["point"], fault["action"]) for fault in case.faults}
        return [
            note
            for note in ended.notes
            if note["kind"] == "fault" and (note["point"], note["action"]) in kinds
        ]

    def _measure(
        self, case: Case, result: Result, ended: Ended, span: tuple[float, float], had: int, waiting: list
    ) -> None:
        """Fill in steps lost and, where this launch shows them, the seconds to recover; otherwise the next
        launch is waited for.
        """
        resumed = [int(step) for step in re.findall(r"resumed after step (\d+)", ended.output)] or [0]
        met = self._met(case, ended)
        if case.tamper and not met:
            result.steps_lost = had - resumed[0]
            again = self._row_time(ended, had) if result.steps_lost else span[0]
            result.recover_seconds = None if again is None else round(again - span[0], 1)
        elif met and case.outcome in GOES_ON:
            at, step = met[0]["time"], met[0]["step"] or 0
            again = self._row_time(ended, step)
            result.steps_lost = step - resumed[-1] if case.outcome == "restarts" else 0
            result.recover_seconds = None if again is None else round(max(0.0, again - at), 1)
        elif met:
            at, step = met[0]["time"], met[0]["step"] or 0
            result.steps_lost = max(0, step - newest_checkpoint(self.broken))
            result.recover_seconds = 0.0 if result.steps_lost == 0 else None
            if result.steps_lost:
                waiting.append((result, step, span[1] - at))

    def _measure_recovery(
        self, ended: Ended, started: float, waiting: list[tuple[Result, int, float]]
    ) -> None:
        for result, step, seconds in waiting:
            again = self._row_time(ended, step)
            if again is None:
                result.problems.append(f"step {step} was not reached again: {ended.output[-1500:]}")
            else:
                result.recover_seconds = round(seconds + again - started, 1)
        waiting.clear()

    def _row_time(self, ended: Ended, step: int) -> float | None:
        return next(
            (note["time"] for note in ended.notes if note["kind"] == "row" and note["row"] >= step), None
        )

    def _compare_rows(self, results: list[Result]) -> None:
        wanted = {row["step"]: row for row in rows_of(self.reference)}
        for row in rows_of(self.broken):
            if row != wanted.get(row["step"]):
                for result in results:
                    result.problems.append(f"row of step {row['step']} differs from the reference's")
                    result.bit_equal = False
                return

    def _compare_whole(self, results: list[Result]) -> None:
        weights = [
            (folder / "hf" / "model.safetensors").read_bytes() for folder in (self.reference, self.broken)
        ]
        equal = weights[0] == weights[1] and list(rows_of(self.reference)) == list(rows_of(self.broken))
        for result in results:
            if not equal:
                result.problems.append("the finished run differs from the reference")
            result.bit_equal = equal and result.bit_equal is not False


def rows_of(run_dir: Path) -> list[dict]:
    """Return the metrics of each step, without those that a fault may change."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in row.items() if not name.startswith(MAY_CHANGE)} for row in rows]


def newest_checkpoint(run_dir: Path) -> int:
    """Return the step of the newest complete checkpoint, 0 where there is none."""
    folders = [path for path in (run_dir / "checkpoints").glob("step_*") if path.name[5:].isdigit()]
    return max((int(path.name[5:]) for path in folders), default=0)


def kept(step: int) -> Callable[[Path], str | None]:
    """Return a check of the run folder: this step was saved."""

    def find_loss(run_dir: Path) -> str | None:
        found = newest_checkpoint(run_dir)
        return None if found == step else f"step {step} is trained, the newest checkpoint is of step {found}"

    return find_loss


def snapshot(run_dir: Path) -> dict[str, bytes]:
    """Return the files that must survive: checkpoints and metrics."""
    files = [*(run_dir / "checkpoints").rglob("*"), run_dir / "metrics.jsonl"]
    return {str(path): path.read_bytes() for path in files if path.is_file()}
