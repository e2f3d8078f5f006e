"""Warnings that an engineer who watches the curves would give: each once a run, with what to do about it.

A rule is a pure function of the rows of the last steps. Its constants are far from what healthy runs show: a
warning that comes in every run is read in none.
"""

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megagrpo.telemetry import names

Row = Mapping[str, float]
WINDOW = 5  # steps that a level is the median of: one odd step warns of nothing
STEPS_IN_A_ROW = 3
LEAST_FREE_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Warning:
    """Something that is worth a look."""

    name: str
    text: str  # one line: what is seen, and what to do


@dataclass(frozen=True)
class Rule:
    """Looks at the rows of the steps so far, oldest first, and says what it sees; None: all is well."""

    name: str
    look: Callable[[Sequence[Row]], str | None]
    advice: str


class Health:
    """Follows a run, and warns of each thing once."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._first: list[Row] = []
        self._warned: set[str] = set()

    def look(self, row: Row) -> list[Warning]:
        """Take the metrics of one more step; return what is new."""
        if names.STEP_SECONDS not in row:  # an evaluation before the first step
            return []
        self._first = [*self._first, row][:WINDOW]
        self._rows = [*self._rows, row][-2 * WINDOW :]
        rows = self._first + [each for each in self._rows if not any(each is first for first in self._first)]
        found = []
        for rule in RULES:
            if rule.name not in self._warned and (seen := rule.look(rows)):
                self._warned.add(rule.name)
                found.append(Warning(rule.name, f"{seen}: {rule.advice}"))
        return found


def look_at_disk(folder: Path) -> list[Warning]:
    """Return a warning where the disk of `folder` is nearly full."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:  # the writers report storage that is gone
        return []
    if free >= LEAST_FREE_BYTES:
        return []
    text = f"the disk of {folder} has {free / 2**30:.1f} GiB left: make room, or lower checkpoint.keep_last"
    return [Warning("disk", text)]


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [value for row in rows if (value := row.get(name)) is not None]


def _levels(rows: Sequence[Row], name: str) -> tuple[float, float] | None:
    """Return the medians over the first and over the newest steps; None before there are enough."""
    values = _values(rows, name)
    if len(values) < 2 * WINDOW:
        return None
    return statistics.median(values[:WINDOW]), statistics.median(values[-WINDOW:])


def _solved_fraction(rows: Sequence[Row]) -> float:
    newest = rows[-WINDOW:]
    groups = sum(_values(newest, names.GROUPS))
    return sum(_values(newest, names.SOLVED_GROUPS)) / groups if groups else 0.0


def _learns(rows: Sequence[Row]) -> bool:
    """Whether the reward is clearly above that of the first steps, or most groups are solved."""
    levels, spread = _levels(rows, names.REWARD), _values(rows[:WINDOW], names.REWARD_STD)
    if levels is None or not spread:
        return True
    return _solved_fraction(rows) > 0.5 or levels[1] > levels[0] + 0.25 * statistics.median(spread)


def _all_of_last(rows: Sequence[Row], count: int, holds: Callable[[Row], bool]) -> bool:
    return len(rows) >= count and all(holds(row) for row in rows[-count:])


def no_signal(rows: Sequence[Row]) -> str | None:
    """No group's rewards differed in the last steps."""
    if not _all_of_last(rows, WINDOW, lambda row: row.get(names.SIGNAL_GROUPS) == 0):
        return None
    kind = "all right" if _solved_fraction(rows) > 0.5 else "all wrong, or all scored alike"
    return f"no group had rewards that differ for {WINDOW} steps ({kind}), so nothing is learnt"


def truncation(rows: Sequence[Row]) -> str | None:
    """Many completions are cut by their length."""
    if not _all_of_last(rows, STEPS_IN_A_ROW, lambda row: row.get(names.CUT_FRACTION, 0.0) > 0.3):
        return None
    return f"{rows[-1][names.CUT_FRACTION]:.0%} of the completions were cut at rollout.max_new_tokens"


def entropy_collapse(rows: Sequence[Row]) -> str | None:
    """The entropy is gone, and the reward has not come for it."""
    levels = _levels(rows, names.ENTROPY)
    if levels is None or levels[1] > 0.2 * levels[0] or _learns(rows):
        return None
    return f"entropy fell from {levels[0]:.3g} to {levels[1]:.3g} and the reward did not rise"


def length_growth(rows: Sequence[Row]) -> str | None:
    """Completions grow, and the reward has not come for it."""
    levels = _levels(rows, names.LENGTH)
    if levels is None or levels[1] < 2 * levels[0] or _learns(rows):
        return None
    return f"completions grew from {levels[0]:.0f} to {levels[1]:.0f} tokens and the reward did not rise"


def kl_growth(rows: Sequence[Row]) -> str | None:
    """The policy runs away from the reference."""
    levels = _levels(rows, names.REFERENCE_KL)
    if levels is None or levels[1] < max(1.0, 10 * levels[0]):
        return None
    return f"KL to the reference is {levels[1]:.3g} a token, from {levels[0]:.3g}"


def mismatch_growth(rows: Sequence[Row]) -> str | None:
    """The engine's log-probs drift away from the actor's."""
    levels = _levels(rows, names.MEAN_LOGPROB_GAP)
    if levels is None or levels[1] < max(1e-3, 5 * levels[0]):
        return None
    return f"engine and actor differ by {levels[1]:.1e} a token on average, from {levels[0]:.1e}"


def no_learning_rate(rows: Sequence[Row]) -> str | None:
    """Updates that change nothing."""
    if not _all_of_last(rows, STEPS_IN_A_ROW, lambda row: row.get(names.LEARNING_RATE) == 0.0):
        return None
    return f"the learning rate was 0 for {STEPS_IN_A_ROW} steps"


def slow_rewards(rows: Sequence[Row]) -> str | None:
    """Scores are waited for longer than completions."""

    def waits(row: Row) -> bool:
        waited = row.get(names.SCORING_WAIT_SECONDS, 0.0)
        return waited > 1.0 and waited > row.get(names.GENERATION_SECONDS, 0.0)

    if not _all_of_last(rows, STEPS_IN_A_ROW, waits):
        return None
    row = rows[-1]
    return (
        f"scores were waited for {row[names.SCORING_WAIT_SECONDS]:.1f} s after "
        f"{row[names.GENERATION_SECONDS]:.1f} s of generation"
    )


def failing_rewards(rows: Sequence[Row]) -> str | None:
    """Rewards fail again and again."""
    if not _all_of_last(rows, STEPS_IN_A_ROW, lambda row: row.get(names.FAILED_FRACTION, 0.0) > 0.1):
        return None
    return f"{rows[-1][names.FAILED_FRACTION]:.0%} of the completions could not be scored"


def repeated_prompts(rows: Sequence[Row]) -> str | None:
    """A step has a prompt twice."""
    repeated = rows[-1].get(names.REPEATED_PROMPTS, 0)
    return f"{repeated:.0f} groups of the step repeat the prompt of another one" if repeated else None


def padding(rows: Sequence[Row]) -> str | None:
    """Much of what the update computes is padding."""
    if not _all_of_last(rows, STEPS_IN_A_ROW, lambda row: row.get(names.PADDING_FRACTION, 0.0) > 0.4):
        return None
    return f"{rows[-1][names.PADDING_FRACTION]:.0%} of the tokens that the update computes are padding"


RULES = (
    Rule(
        "no_signal",
        no_signal,
        "look at completions/ (is the reward right?), take easier or harder prompts, a higher "
        "rollout.temperature, or algorithm.dynamic_sampling.enabled=true",
    ),
    Rule(
        "truncation",
        truncation,
        "raise rollout.max_new_tokens, check that the model ends its answers (stop, chat template), or set "
        "algorithm.overlong.mask=true",
    ),
    Rule(
        "entropy_collapse",
        entropy_collapse,
        "lower optimizer.lr, raise algorithm.clip_high (DAPO takes 0.28), or set algorithm.entropy_coef",
    ),
    Rule(
        "length_growth",
        length_growth,
        "read the longest completions; algorithm.aggregation=token_mean or a penalty "
        "(algorithm.overlong.penalty) hold it back",
    ),
    Rule(
        "kl_growth",
        kl_growth,
        "lower optimizer.lr or raise algorithm.kl.coef; check that the reward can't be gamed",
    ),
    Rule(
        "mismatch_growth",
        mismatch_growth,
        "set algorithm.correction.importance=token, compare precision.recipe with the engine's, and see "
        "rollout.logprob_gap",
    ),
    Rule(
        "no_learning_rate",
        no_learning_rate,
        "check optimizer.lr, optimizer.warmup_steps and optimizer.min_lr_fraction",
    ),
    Rule(
        "slow_rewards",
        slow_rewards,
        "raise rewards.workers, or make the reward faster (tools/audit_reward.py times it)",
    ),
    Rule(
        "failing_rewards",
        failing_rewards,
        "the reasons are in completions/ (outcome, detail); rewards.timeout_seconds and rewards.memory_gib "
        "bound them",
    ),
    Rule(
        "repeated_prompts",
        repeated_prompts,
        "the data set is smaller than the step: add prompts or lower rollout.prompts_per_step",
    ),
    Rule(
        "padding",
        padding,
        "raise update.max_tokens_per_microbatch, set update.packing=true, or take more completions a step: "
        "each data parallel rank and pipeline stage needs micro-batches that are full",
    ),
)
