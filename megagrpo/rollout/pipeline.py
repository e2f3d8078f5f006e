"""The rollout part of the training loop: which prompts a step takes, when they are generated, and what of it a checkpoint keeps.

synchronous     generate 1 | train 1 | publish | generate 2 | train 2 | publish | ...
one_step_off    generate 1 | train 1      | publish | train 2      | publish | ...
                           | generate 2   |         | generate 3   |
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megagrpo.config.schema import Config
from megagrpo.parallel.groups import all_reduce_flag
from megagrpo.rollout import in_flight
from megagrpo.rollout.dealing import LengthEstimates
from megagrpo.rollout.dynamic_sampling import SamplingCounts, collect_groups
from megagrpo.rollout.generation import PendingRollouts, RolloutFailedError, RolloutGenerator, RolloutRequest, ScoredCompletions
from megagrpo.rollout.prompts import PromptSampler
from megagrpo.rollout.rollouts import StepRollouts
from megagrpo.types import Prompt, SamplingParams


@dataclass(frozen=True)
class RolloutSnapshot:
    """What a checkpoint keeps of the rollouts."""

    prompt_position: int  # prompts drawn for the steps that are trained, and for those in flight
    state: dict[str, Any]  # JSON, the same on all ranks
    rank: int
    share: ScoredCompletions | None = None  # this rank's, of the rollouts in flight

    def files(self) -> dict[str, bytes]:
        """Return this rank's files, by name."""
        return {} if self.share is None else {in_flight.file_name(self.rank): in_flight.pack_share(self.share)}


class RolloutPipeline:
    """Feeds the loop with one step's groups after the other.

    Where the mode is one step off, the rollouts of the next step are generated while the one before is trained, under the weights before
    its update. They have ended before new weights are published, so every completion has one weight version, the newest but one at most.
    """

    def __init__(self, config: Config, generator: RolloutGenerator, sampler: PromptSampler):
        self.config, self.generator, self.sampler = config, generator, sampler
        self.lengths = LengthEstimates()
        self._ahead = config.rollout.off_policy == "one_step_off"
        self._pending: PendingRollouts | None = None
        self._position = sampler.state()  # before the prompts of the first step that is not collected

    def collect(self, step: int, weight_version: int) -> tuple[StepRollouts, SamplingCounts]:
        """Return the groups that train in `step`, and what it took to find them; begin with those of the next step where that is the mode.

        Collective over all ranks.

        Args:
            weight_version: of the actor, which the engine serves.

        Raises:
            UserError, RolloutFailedError: generating or scoring failed on some rank; raised on all ranks.
        """
        rollout = self.config.rollout
        if self._pending is None:
            self._position = self.sampler.state()

        def generate(count: int, refill: int) -> StepRollouts:
            if self._pending is not None:
                pending, self._pending = self._pending, None
                return self.generator.finish(pending)
            # A refill may draw a prompt again (small data sets): other completion indices make it another group.
            first_index = refill * rollout.prompts_per_step * rollout.completions_per_prompt
            return self.generator.generate(self._request(step, self.sampler.next(count), first_index))

        rollouts, counts = collect_groups(generate, rollout.prompts_per_step, self.config.algorithm.dynamic_sampling)
        self._check_ages(step, rollouts, weight_version)
        self._position = self.sampler.state()
        if self._ahead and step < self.config.run.steps:
            self._pending = self.generator.start(self._request(step + 1, self.sampler.next(rollout.prompts_per_step)))
        return rollouts, counts

    def wait(self) -> None:
        """Wait until no rank generates, so that the engines, which ranks may share, can take new weights. Collective over all ranks.

        What failed is raised by `collect`.
        """
        if self._pending is not None:
            self._pending.outcome()
            all_reduce_flag(False)  # a barrier

    def close(self) -> None:
        """End what is in flight on this rank."""
        if self._pending is not None:
            self.generator.stop(self._pending)
            self._pending = None

    @property
    def next_position(self) -> int:
        """Prompts drawn for the steps that were collected; those in flight come after."""
        return self._position

    def skip_to(self, position: int) -> None:
        """Give up what is in flight, and draw the next step's prompts from `position` on. Every rank must."""
        if self._pending is not None:
            self._pending.outcome()
            self._pending = None
        self.sampler.load_state(position)
        self._position = position

    # ---- checkpoints

    def snapshot(self) -> RolloutSnapshot:
        """Wait for the rollouts in flight and return what a checkpoint keeps. Collective over all ranks.

        Where they failed on any rank they are left out, and the position is the one before their prompts: none is lost or comes twice.
        """
        rank, state = self.generator.groups.rank, {"lengths": self.lengths.state(), "in_flight": None}
        share = None if self._pending is None else self._pending.outcome()
        is_whole = isinstance(share, ScoredCompletions) and share.failure is None
        if all_reduce_flag(not is_whole) or self._pending is None or not isinstance(share, ScoredCompletions):
            return RolloutSnapshot(self._position, state, rank)
        state["in_flight"] = {
            "request": _describe(self._pending.request),
            "prompt_ids": [prompt.id for prompt in self._pending.request.prompts],
            "prompt_position": self._position,
            "num_files": self.generator.groups.world_size,
        }
        return RolloutSnapshot(self.sampler.state(), state, rank, share)

    def restore(self, prompt_position: int, state: Mapping[str, Any], folder: Path, next_step: int) -> None:
        """Go on from a snapshot whose files lie in `folder`; any number of ranks may.

        Rollouts in flight are taken up where this run would have asked for the same; otherwise (another mode or other sampling settings)
        their prompts are drawn again.
        """
        self.skip_to(prompt_position)
        self.lengths.load_state(state["lengths"])
        saved = state["in_flight"]
        if saved is None:
            return
        prompt_ids, groups = saved["prompt_ids"], self.generator.groups
        wanted = (_describe(self._request(next_step, [])), self.config.rollout.prompts_per_step)
        if not self._ahead or wanted != (saved["request"], len(prompt_ids)):
            self.skip_to(saved["prompt_position"])
            return
        request = self._request(next_step, [self.sampler.source.with_id(prompt_id) for prompt_id in prompt_ids])
        self._position = saved["prompt_position"]
        self._pending = PendingRollouts(request, in_flight.read_shares(folder, saved["num_files"], groups.rank, groups.world_size))

    # ---- requests

    def _request(self, step: int, prompts: list[Prompt], first_index: int = 0) -> RolloutRequest:
        rollout = self.config.rollout
        sampling = SamplingParams(
            max_new_tokens=rollout.max_new_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
            stop_token_ids=rollout.stop_token_ids,
            seed=self.config.run.seed,
            step=step,
        )
        return RolloutRequest(prompts, sampling, rollout.completions_per_prompt, first_index, self.lengths)

    def _check_ages(self, step: int, rollouts: StepRollouts, weight_version: int) -> None:
        """Refuse completions of weights that are older than the mode allows: an engine that kept serving a version it shouldn't."""
        allowed = self.config.rollout.max_policy_age
        oldest = min((record.weight_version for record in rollouts.records.values()), default=weight_version)
        if weight_version - oldest > allowed:
            raise RolloutFailedError(
                f"step {step}: completions were sampled under weight version {oldest}, the actor is at {weight_version}; "
                f"rollout.off_policy {self.config.rollout.off_policy} allows an age of {allowed}"
            )


def _describe(request: RolloutRequest) -> dict[str, Any]:
    """Return what decides, beside prompts and weights, what is generated; as it comes back from JSON."""
    sampling = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(request.sampling).items()}
    return {"sampling": sampling, "completions_per_prompt": request.completions_per_prompt}
