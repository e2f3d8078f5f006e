"""The line of a step: what an RL engineer looks at, as much of it as the width holds."""

from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from megagrpo.telemetry import names

_STYLES = {"step": "bold", "reward": "green", "eval": "bold green", "SKIPPED": "bold red"}


def format_step(step: int, num_steps: int, metrics: Mapping[str, float], width: int | None = None) -> str:
    """Return the line, e.g. `step  3/100  reward 0.412 ±0.31  signal 21/32  len 512  ent 0.31  gap 1e-06
    1234 tok/s  0.45 s`.

    What the metrics do not hold is left out. Where the line is wider than `width` columns, what matters least
    goes first; None: all of it stays.
    """
    head = f"step {step:>{len(str(num_steps))}}/{num_steps}"
    parts = list(_parts(metrics))
    while parts and width is not None and len("  ".join([head, *(text for _, text in parts)])) > width:
        least = max(rank for rank, _ in parts)
        if least == 0:
            break
        parts.pop(max(place for place, (rank, _) in enumerate(parts) if rank == least))
    return "  ".join([head, *(text for _, text in parts)])


def style_line(line: str) -> Text:
    """Return a step's line in colours."""
    text = Text()
    for index, part in enumerate(line.split("  ")):
        text.append(("  " if index else "") + part, style=_STYLES.get(part.split(" ")[0], ""))
    return text


def _parts(metrics: Mapping[str, float]) -> Iterator[tuple[int, str]]:
    """Yield (rank, text) from left to right; the higher the rank, the earlier it goes. Rank 0 stays."""
    if names.REWARD in metrics:
        spread = f" ±{metrics[names.REWARD_STD]:.2f}" if names.REWARD_STD in metrics else ""
        yield 0, f"reward {metrics[names.REWARD]:.3f}{spread}"
    for name, value in metrics.items():
        if held_out := names.evaluation_set(name):
            yield 0, f"eval {held_out} {value:.3f}"
    if names.GROUPS in metrics:
        yield 1, f"signal {metrics[names.SIGNAL_GROUPS]:.0f}/{metrics[names.GROUPS]:.0f}"
    if names.LENGTH in metrics:
        yield 2, f"len {_short(metrics[names.LENGTH])}"
        if metrics.get(names.CUT_FRACTION, 0.0) >= 0.005:  # below that it would read 0 %
            yield 2, f"cut {metrics[names.CUT_FRACTION]:.0%}"
    yield from _learning(metrics)
    if metrics.get(names.SKIPPED_UPDATES):
        yield 0, f"SKIPPED {metrics[names.SKIPPED_UPDATES]:.0f} (not finite)"
    if names.LOGPROB_GAP in metrics:
        yield 4, f"gap {metrics[names.LOGPROB_GAP]:.0e}"
    if seconds := metrics.get(names.STEP_SECONDS):
        if names.GENERATED_TOKENS in metrics:
            yield 1, f"{_short(metrics[names.GENERATED_TOKENS] / seconds)} tok/s"
        yield 0, f"{_short(seconds)} s"


def _learning(metrics: Mapping[str, float]) -> Iterator[tuple[int, str]]:
    numbers: Sequence[tuple[int, str, str, str]] = (
        (3, "ent", names.ENTROPY, ".3f"),
        (3, "kl", names.REFERENCE_KL, ".1e"),
        (7, "grad", names.GRAD_NORM, ".2f"),
    )
    for rank, label, name, form in numbers:
        if name in metrics:
            yield rank, f"{label} {metrics[name]:{form}}"
    if metrics.get(names.CLIP_FRACTION):
        yield 5, f"clip {metrics[names.CLIP_FRACTION]:.1%}"
        if names.LOSS in metrics:  # with one update a step the ratio is 1, and the loss says nothing
            yield 8, f"loss {metrics[names.LOSS]:.1e}"


def _short(number: float) -> str:
    """Return about three digits: 0.45, 4.5, 512, 12.3k."""
    if abs(number) >= 10_000:
        return f"{number / 1000:.3g}k"
    if abs(number) >= 100:
        return f"{number:.0f}"
    return f"{number:.1f}" if abs(number) >= 10 else f"{number:.2f}"
