"""Measures how a reward judges: run it on completions whose scores are known.

    python tools/audit_reward.py                        # every registered reward on its built-in cases
    python tools/audit_reward.py math --options '{"fallback": "last_number"}' --cases mine.jsonl
    python tools/audit_reward.py my_reward.py:reward --cases mine.jsonl --json audit.json

A case is a line of JSON: `text`, `want` (the right score), `columns` (of the prompt), and optionally `kind`
(correct, incorrect, malformed, adversarial), `options` (of the reward, for this case), `finish_reason` and
`tokens`. A
score above `want` is a false accept, one below it a false reject; a completion without a score (a time-out,
an error) counts as `failed` and has the value 0. The exit status is 1 where there is any false accept.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megagrpo.config.rollout_sections import RewardsConfig
from megagrpo.errors import UserError
from megagrpo.rewards.build import REWARDS
from megagrpo.rewards.pool import RewardPool
from megagrpo.types import Completion, Prompt, Reward

sys.path.insert(0, str(Path(__file__).parent))

from echo_endpoint import echo_endpoint

BUILT_IN = Path(__file__).parents[1] / "tests/unit/rewards/cases"
# rewards that ask an endpoint: one of ours answers as the case says, and what is audited is how it is read
ECHOED = {
    "judge": {"model": "echo", "template": "{reply}", "retries": 0},
    "reward_model": {"retries": 0},
}
KINDS = ("correct", "incorrect", "malformed", "adversarial")


@dataclass(frozen=True)
class Case:
    """A completion whose score is known."""

    text: str
    want: float
    columns: dict[str, Any] = field(default_factory=dict)
    kind: str = "correct"
    options: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"
    tokens: int = 1  # length of the completion


@dataclass(frozen=True)
class Row:
    """What a reward did with the cases of one kind."""

    verifier: str
    kind: str
    cases: int
    false_accepts: int
    false_rejects: int
    failed: int
    seconds: float


def read_cases(path: Path) -> list[Case]:
    """Return the cases of a file; raises UserError that names the line which is none."""
    cases = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            cases.append(Case(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}, line {number}: {error}") from error
    return cases


def score_cases(
    name: str, options: dict[str, Any], cases: Sequence[Case], timeout_seconds: float, network: bool = False
) -> list[tuple[Case, Reward, float]]:
    """Return each case with its reward and the seconds that it took, in worker processes as in a run."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[json.dumps({**options, **case.options}, sort_keys=True)].append(case)
    scored = []
    for shown, group in groups.items():
        config = RewardsConfig(
            functions=[{"name": name, "options": json.loads(shown)}],
            timeout_seconds=timeout_seconds,
            outage_seconds=1e9,  # cases may all be hopeless
            network=network,
        )
        with RewardPool(config) as pool:
            for case in group:
                prompt = Prompt(0, "", (), case.columns)
                completion = Completion.sampled(
                    0,
                    0,
                    np.zeros(case.tokens),
                    np.zeros(case.tokens),
                    case.finish_reason,
                    ((0, 0),),
                    case.text,
                )
                started = time.perf_counter()
                (reward,) = pool.score([prompt], [completion])
                scored.append((case, reward, time.perf_counter() - started))
    return scored


def tally(name: str, scored: Sequence[tuple[Case, Reward, float]]) -> list[Row]:
    """Return a row per kind of case, and one of all."""
    rows = []
    for kind in (*sorted({case.kind for case, _, _ in scored}, key=_order), "all"):
        some = [entry for entry in scored if kind in (entry[0].kind, "all")]
        rows.append(
            Row(
                verifier=name,
                kind=kind,
                cases=len(some),
                false_accepts=sum(reward.value > case.want for case, reward, _ in some),
                false_rejects=sum(reward.value < case.want for case, reward, _ in some),
                failed=sum(reward.outcome != "ok" for _, reward, _ in some),
                seconds=round(sum(seconds for _, _, seconds in some), 3),
            )
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where there is a false accept."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "rewards", nargs="*", help="registered names, FILE.py:function or package.module:function"
    )
    parser.add_argument(
        "--cases", type=Path, action="append", default=[], help="a file of cases, beside built-in ones"
    )
    parser.add_argument("--options", type=json.loads, default={}, help="the reward's options, JSON")
    parser.add_argument("--timeout-seconds", type=float, default=10.0)
    parser.add_argument("--network", action="store_true", help="as rewards.network: true")
    parser.add_argument("--show", type=int, default=20, help="misjudged cases to print")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args(arguments)
    rows: list[Row] = []
    try:
        for name in given.rewards or REWARDS.names():
            built_in = BUILT_IN / f"{name}.jsonl"
            paths = [*([built_in] if name in REWARDS.names() else []), *given.cases]
            cases = [case for path in paths for case in read_cases(path)]
            if not cases:
                raise UserError(f"{name}: there are no built-in cases for it; give some by --cases FILE")
            if name in ECHOED:
                with echo_endpoint() as endpoint:
                    options = {"address": endpoint.address, **ECHOED[name], **given.options}
                    scored = score_cases(name, options, cases, given.timeout_seconds, network=True)
            else:
                scored = score_cases(name, given.options, cases, given.timeout_seconds, given.network)
            rows += tally(name, scored)
            _show(scored, given.show)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _print_table(rows)
    if given.json:
        given.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return int(any(row.false_accepts for row in rows))


def _order(kind: str) -> tuple[int, str]:
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), kind)


def _show(scored: Sequence[tuple[Case, Reward, float]], count: int) -> None:
    for case, reward, _ in [entry for entry in scored if entry[1].value != entry[0].want][:count]:
        why = f" ({reward.outcome}: {reward.detail})" if reward.outcome != "ok" else ""
        print(f"{case.kind}: {reward.value:g} for {case.want:g}{why}: {case.text[:100]!r}  {case.columns}")


def _print_table(rows: Sequence[Row]) -> None:
    header = list(asdict(rows[0]))
    table = [header, *([str(value) for value in asdict(row).values()] for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    for line in table:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
