"""Tells a broken scorer from completions that are hard to score."""

from dataclasses import dataclass, field

from megagrpo.errors import UserError
from megagrpo.rewards.messages import Reply, Request, Scores

# One prompt's completions may all be hopeless (a gold answer that no comparison ends with).
MIN_PROMPTS = 2


@dataclass
class _Failures:
    """The failures of one reward since it last scored anything."""

    first: str
    seconds: float = 0.0
    prompts: set[int] = field(default_factory=set)


class OutageWatch:
    """Ends the run where a reward has scored nothing for `outage_seconds` of its workers' time, over several
    prompts. Without it, a step of 256 completions whose judge is down takes 256 time-outs.
    """

    def __init__(self, names: tuple[str, ...], outage_seconds: float, workers: int):
        self._names, self._outage_seconds, self._workers = names, outage_seconds, workers
        self._failures: dict[int, _Failures] = {}

    def observe(self, request: Request, reply: Reply, seconds: float) -> None:
        """Count a reply that took `seconds`.

        Raises:
            UserError: the scorer is broken.
        """
        if isinstance(reply, Scores):
            self._failures.pop(request.reward, None)
            return
        outcome, detail = getattr(reply, "outcome", ""), getattr(reply, "detail", "")
        failures = self._failures.setdefault(request.reward, _Failures(f"{outcome}: {detail}"))
        failures.seconds += seconds / self._workers
        failures.prompts.update(prompt.id for prompt in request.prompts)
        if failures.seconds > self._outage_seconds and len(failures.prompts) >= MIN_PROMPTS:
            raise UserError(
                f"scorer outage: reward {self._names[request.reward]!r} scored nothing in "
                f"{failures.seconds:.0f} s, of {len(failures.prompts)} prompts; first failure: "
                f"{failures.first} (rewards.outage_seconds is {self._outage_seconds:g})"
            )
