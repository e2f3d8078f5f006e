"""Which prompts engine and trainer are compared on."""

from itertools import pairwise

from megagrpo.types import Prompt
from megagrpo.weights.probe import NUM_PROMPTS, choose_prompts


def test_prompts_come_from_all_over_the_set():
    prompts = [Prompt(number, "", (number,)) for number in range(101)]
    chosen = [prompt.id for prompt in choose_prompts(prompts)]
    assert len(chosen) == NUM_PROMPTS and chosen[0] == 0
    assert all(24 <= after - before <= 26 for before, after in pairwise(chosen))


def test_a_set_of_one_prompt_is_asked_that_one():
    assert [prompt.id for prompt in choose_prompts([Prompt(7, "", (1,))])] == [7]
