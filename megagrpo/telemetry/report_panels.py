"""Which curves belong together on the report's page."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

from megagrpo.telemetry import names


@dataclass(frozen=True)
class Curve:
    """One metric of a panel, minus others, over another."""

    label: str
    metric: str
    right: bool = False  # on the right axis
    band: str = ""  # metric that is shown as a band around it
    times: float = 1.0  # its width
    less: tuple[str, ...] = ()  # metrics that are taken off
    over: str = ""  # metric that it is divided by


@dataclass(frozen=True)
class Panel:
    """Curves with axes of their own."""

    title: str
    curves: tuple[Curve, ...]
    note: str = ""
    kind: Literal["lines", "stack", "bars"] = "lines"
    log: bool = False
    others: str = field(default="", metadata={"help": "prefix of further metrics, a curve each"})


PHASES = ("rollout", "update", "publish")  # what a step's seconds are made of

PANELS = (
    Panel(
        "Reward",
        (Curve("mean", names.REWARD, band=names.REWARD_STD),),
        "mean of all completions of a step; the band is one standard deviation",
    ),
    Panel("Evaluation", (), "held-out sets with 95 % intervals over prompts", others=names.EVALUATION),
    Panel(
        "Groups by outcome",
        (
            Curve("signal", names.SIGNAL_GROUPS),
            Curve("all right", names.SOLVED_GROUPS),
            Curve("all wrong", names.GROUPS, less=(names.SIGNAL_GROUPS, names.SOLVED_GROUPS)),
        ),
        "only groups whose rewards differ teach",
        "stack",
    ),
    Panel(
        "Length",
        (Curve("tokens", names.LENGTH), Curve("share cut", names.CUT_FRACTION, right=True)),
        "mean completion; right: share cut at max_new_tokens",
    ),
    Panel("Entropy", (Curve("entropy", names.ENTROPY),), "nats a token"),
    Panel(
        "KL and clipping",
        (
            Curve("KL to the reference", names.REFERENCE_KL),
            Curve("KL to the old policy", "policy/old_kl"),
            Curve("clip share", names.CLIP_FRACTION, right=True),
        ),
        "right: share of tokens whose gradient is cut",
    ),
    Panel(
        "Mismatch of engine and actor",
        (Curve("largest", names.LOGPROB_GAP), Curve("mean", names.MEAN_LOGPROB_GAP)),
        "|log-prob difference| of the same tokens",
        log=True,
    ),
    Panel(
        "Mismatch by position and age",
        (),
        "mean difference by the token's place, and by the age of the weights that sampled it",
        log=True,
        others="policy/rollout_gap/",
    ),
    Panel("Reward parts", (), "before their weights", others="reward/"),
    Panel(
        "Seconds of a step",
        (
            *(Curve(phase, f"time/{phase}_seconds") for phase in PHASES),
            Curve("rest", names.STEP_SECONDS, less=tuple(f"time/{phase}_seconds" for phase in PHASES)),
        ),
        "without evaluation and checkpoint",
        "bars",
    ),
    Panel(
        "Throughput",
        (
            Curve("tokens/s of the step", names.GENERATED_TOKENS, over=names.STEP_SECONDS),
            Curve("of generation alone", names.GENERATED_TOKENS, over=names.GENERATION_SECONDS),
        ),
        "generated tokens over all ranks",
    ),
    Panel(
        "Optimizer",
        (
            Curve("gradient norm", names.GRAD_NORM),
            Curve("learning rate", names.LEARNING_RATE, right=True),
        ),
        "norm before clipping",
    ),
    Panel("Loss", (), "near 0 by construction where a step has one update", others="loss/"),
)


def select_panels(available: Collection[str]) -> list[dict[str, Any]]:
    """Return the panels of the page, as JSON; curves without a metric, and panels without a curve, are left
    out.
    """
    panels = []
    for panel in PANELS:
        curves = [
            curve
            for curve in (*panel.curves, *_others(panel.others, available))
            if {curve.metric, *curve.less, *([curve.over] if curve.over else [])} <= set(available)
        ]
        if curves:
            panels.append(
                {
                    "title": panel.title,
                    "note": panel.note,
                    "kind": panel.kind,
                    "log": panel.log,
                    "curves": [vars(curve) for curve in curves],
                }
            )
    return panels


def _others(prefix: str, available: Collection[str]) -> list[Curve]:
    if prefix == names.EVALUATION:
        sets = sorted(name for name in available if names.evaluation_set(name))
        return [
            Curve(name.removeprefix(prefix), name, band=f"{name}/{names.STANDARD_ERROR}", times=1.96)
            for name in sets
        ]
    own = {names.REWARD, names.REWARD_STD}
    found = [name for name in available if prefix and name.startswith(prefix) and name not in own]
    return [
        Curve(name.removeprefix(prefix), name)
        for name in sorted(found)
        if not name.startswith(names.FAILED_FRACTION)
    ]
