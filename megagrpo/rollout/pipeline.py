"""The rollout part of the training loop: which prompts a step takes, when they are generated, and what of it
a checkpoint keeps.

synchronous     generate 1 | train 1 | publish | generate 2 | train 2 | publish | ...
one_step_off    generate 1 | train 1      | publish | train 2      | publish | ...
                           | generate 2   |         | generate 3   |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.config.rollout_sections import RolloutConfig
from megagrpo.parallel.groups import all_reduce_flag
from megagrpo.rollout import in_flight
from megagrpo.rollout.data_identity import compare_data, describe_data, describe_other_columns
from megagrpo.rollout.dealing import LengthEstimates
from megagrpo.rollout.dynamic_sampling import SamplingCounts, collect_groups
from megagrpo.rollout.generation import RolloutFailedError, RolloutGenerator
from megagrpo.rollout.in_flight import (
    PendingRollouts,
    RolloutRequest,
    ScoredCompletions,
    sampling_by_source,
    sampling_of_run,
)
from megagrpo.rollout.prompts import PromptSampler
from megagrpo.rollout.rollouts import StepRollouts
from megagrpo.types import Prompt, SamplingParams, Snapshot


class RolloutPipeline:
    """Feeds the loop with one step's groups after the other.

    Where the mode is one step off, the rollouts of the next step are generated while the one before is
    trained, under the weights before its update. They have ended before new weights are published, so every
    completion has one weight version, the newest but one at most.
    """

    def __init__(
        self,
        *,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        num_steps: int,
        seed: int,
        generator: RolloutGenerator,
        sampler: PromptSampler,
        allowed_changes: Sequence[str],
        note: Callable[[str], None],
    ):
        """Begin before the first step of the run.

        Args:
            rollout: how many groups a step has, and how they are sampled.
            algorithm: whether groups without a signal are drawn again.
            num_steps: of the run: nothing is generated after the last.
            seed: of the sampling.
            allowed_changes: `run.allow_config_changes`, for a run that goes on with other prompts.
            note: called with a line where it does.
        """
        self.rollout, self.algorithm, self.num_steps, self.seed = rollout, algorithm, num_steps, seed
        self.generator, self.sampler = generator, sampler
        self._allowed_changes, self._note = allowed_changes, note
        self._data = describe_data(sampler.source.prompts)
        self.lengths = LengthEstimates()
        self._ahead = rollout.off_policy == "one_step_off"
        self._pending: PendingRollouts | None = None
        self._position = sampler.state()  # before the prompts of the first step that is not collected
        self._next_step = 1

    def collect(self, step: int, weight_version: int) -> tuple[StepRollouts, SamplingCounts]:
        """Return the groups that train in `step`, and what it took to find them; begin with those of the next
        step where that is the mode.

        Collective over all ranks.

        Args:
            weight_version: of the actor, which the engine serves.

        Raises:
            SharedUserError, RolloutFailedError: generating or scoring failed on some rank; raised on all
                ranks.
        """
        rollout = self.rollout
        if self._pending is None:
            self._position = self.sampler.state()

        def generate(count: int, refill: int) -> StepRollouts:
            if self._pending is not None:
                pending, self._pending = self._pending, None
                return self.generator.finish(pending)
            # A refill may draw a prompt again (small data sets): other completion indices make it another
            # group.
            first_index = refill * rollout.prompts_per_step * rollout.completions_per_prompt
            return self.generator.generate(self._request(step, self.sampler.next(count), first_index))

        rollouts, counts = collect_groups(generate, rollout.prompts_per_step, self.algorithm)
        curriculum = self.sampler.curriculum
        curriculum.observe(counts.groups)
        counts = replace(counts, curriculum=curriculum.counts())
        self._check_ages(step, rollouts, weight_version)
        self._position, self._next_step = self.sampler.state(), step + 1
        if self._ahead and step < self.num_steps:
            self._pending = self.generator.start(
                self._request(step + 1, self.sampler.next(rollout.prompts_per_step))
            )
        return rollouts, counts

    def wait(self) -> None:
        """Wait until no rank generates, so that the engines, which ranks may share, can take new weights.
        Collective over all ranks.

        What one engine has failed on is generated by others before that: it comes from the weights of the
        rest of its step. Where none is left, it comes from the next ones. What failed otherwise is raised by
        `collect`.
        """
        if self._pending is not None:
            self._pending = self.generator.settle(self._pending)

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

    def snapshot(self) -> Snapshot:
        """Wait for the rollouts in flight and return what a checkpoint keeps: what the prompts are, the
        lengths of completions, the next step, prompts drawn before it, and the rollouts of it that are in
        flight. Collective over all ranks.

        Where they failed on any rank they are left out: their prompts are drawn again.
        """
        state: dict[str, Any] = {
            "data": self._data,
            "next_step": self._next_step,
            "prompt_position": self._position,
            "lengths": self.lengths.state(),
            "in_flight": None,
        }
        if self.sampler.curriculum.is_on:
            state["curriculum"] = self.sampler.curriculum.state()
        share = None if self._pending is None else self._pending.outcome()
        is_whole = isinstance(share, ScoredCompletions) and share.failure is None
        if all_reduce_flag(not is_whole) or self._pending is None or not isinstance(share, ScoredCompletions):
            return Snapshot(state)
        groups = self.generator.groups
        state["in_flight"] = {
            "request": _describe(self._pending.request),
            "prompt_ids": [prompt.id for prompt in self._pending.request.prompts],
            "prompts_drawn": self.sampler.state(),
            "num_files": groups.world_size,
        }
        return Snapshot(state, lambda: {in_flight.file_name(groups.rank): in_flight.pack_share(share)})

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Go on from a snapshot whose files lie in `folder`; any number of ranks may.

        Rollouts in flight are taken up where this run would have asked for the same; otherwise (another mode
        or other sampling settings) their prompts are drawn again. With other prompts than the snapshot's,
        where the run may have them, the first epoch of these begins.

        Raises:
            UserError: the prompts are others, and the run may not have them.
        """
        self._next_step = state["next_step"]
        source = self.sampler.source.config.description
        changed = compare_data(state["data"], self._data, source, self._allowed_changes)
        if changed is not None:
            self.skip_to(0)
            self._note(changed)
            return
        if columns := describe_other_columns(state["data"], self._data):
            self._note(f"warning: data.source: {source}: {columns}; the run goes on at its position")
        self.skip_to(state["prompt_position"])
        self.lengths.load_state(state["lengths"])
        if "curriculum" in state:  # it was on
            self.sampler.curriculum.load_state(state["curriculum"])
        saved = state["in_flight"]
        if saved is None:
            return
        prompt_ids, groups = saved["prompt_ids"], self.generator.groups
        wanted = (_describe(self._request(self._next_step, [])), self.rollout.prompts_per_step)
        if not self._ahead or wanted != (saved["request"], len(prompt_ids)):
            return
        prompts = [self.sampler.source.with_id(prompt_id) for prompt_id in prompt_ids]
        self.sampler.load_state(saved["prompts_drawn"])
        self._pending = PendingRollouts(
            self._request(self._next_step, prompts),
            in_flight.read_shares(folder, saved["num_files"], groups.rank, groups.world_size),
        )

    # ---- requests

    def _request(self, step: int, prompts: list[Prompt], first_index: int = 0) -> RolloutRequest:
        sampling = sampling_of_run(self.rollout, self.seed, step)
        by_source = sampling_by_source(self.sampler.source.config, sampling)
        count = self.rollout.completions_per_prompt
        return RolloutRequest(prompts, sampling, count, first_index, self.lengths, by_source)

    def _check_ages(self, step: int, rollouts: StepRollouts, weight_version: int) -> None:
        """Refuse completions of weights that are older than the mode allows: an engine that kept serving a
        version it shouldn't.
        """
        allowed = self.rollout.max_policy_age
        oldest = min((record.weight_version for record in rollouts.records.values()), default=weight_version)
        if weight_version - oldest > allowed:
            raise RolloutFailedError(
                f"step {step}: completions were sampled under weight version {oldest}, the actor is at "
                f"{weight_version}; "
                f"rollout.off_policy {self.rollout.off_policy} allows an age of {allowed}"
            )


def _describe(request: RolloutRequest) -> dict[str, Any]:
    """Return all that decides what is generated, beside prompts and weights, in the types that come back from
    JSON.
    """
    return {
        "sampling": _describe_sampling(request.sampling),
        "by_source": {name: _describe_sampling(each) for name, each in request.by_source.items()},
        "completions_per_prompt": request.completions_per_prompt,
    }


def _describe_sampling(sampling: SamplingParams) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in asdict(sampling).items()
    }
