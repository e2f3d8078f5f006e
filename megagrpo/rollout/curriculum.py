"""Prompts that taught nothing the last time come again less often.

A visit to a prompt whose newest group was all right, or all wrong, is passed over with a probability. The
draw is a function of the seed and the position, and what is known of the prompts is part of the checkpoint:
a resumed run passes over the same ones. An epoch then no longer has every prompt.
"""

import base64
import zlib
from collections.abc import Sequence

import numpy as np

from megagrpo.config.rollout_sections import CurriculumConfig
from megagrpo.rollout.group_results import GroupResult
from megagrpo.types import Prompt
from megagrpo.wire.counter_sampling import draw_uniforms, row_keys

MIXED, SOLVED, UNSOLVED = 1, 2, 3  # 0: not known yet
CURRICULUM_STREAM = 1 << 40  # in place of a step: no draw of tokens shares it


class Curriculum:
    """What the newest group of every prompt came to."""

    def __init__(self, config: CurriculumConfig, prompts: Sequence[Prompt], seed: int):
        """Begin with nothing known of the prompts."""
        self._skipped = {SOLVED: config.skip_solved, UNSOLVED: config.skip_unsolved}
        self.is_on = any(self._skipped.values())
        self._seed = seed
        self._place = {prompt.id: place for place, prompt in enumerate(prompts)} if self.is_on else {}
        self._outcomes = np.zeros(len(self._place), np.int8)

    def passes_over(self, prompt: Prompt, position: int) -> bool:
        """Say whether the visit at `position` to a prompt is passed over."""
        if not self.is_on:
            return False
        probability = self._skipped.get(int(self._outcomes[self._place[prompt.id]]), 0.0)
        key = row_keys(self._seed, CURRICULUM_STREAM, [prompt.id], [0])
        return bool(draw_uniforms(key, np.array([position]))[0] < probability)

    def observe(self, groups: Sequence[GroupResult]) -> None:
        """Take in the groups that a step has sampled. The same on all ranks."""
        for group in groups if self.is_on else ():
            outcome = MIXED if not group.is_equal else SOLVED if group.reward > 0 else UNSOLVED
            self._outcomes[self._place[group.prompt_id]] = outcome

    def counts(self) -> dict[str, int]:
        """Return how many prompts are known to be solved and unsolved."""
        if not self.is_on:
            return {}
        found = np.bincount(self._outcomes, minlength=4)
        return {"data/solved_prompts": int(found[SOLVED]), "data/unsolved_prompts": int(found[UNSOLVED])}

    def state(self) -> str:
        """Return what is known, as text."""
        return base64.b64encode(zlib.compress(self._outcomes.tobytes())).decode()

    def load_state(self, state: str) -> None:
        """Take up what `state` returned for the same prompts; nothing is known where it was off."""
        outcomes = np.frombuffer(zlib.decompress(base64.b64decode(state)), np.int8)
        if len(outcomes) == len(self._outcomes):
            self._outcomes = outcomes.copy()
