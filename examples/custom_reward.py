"""A reward of your own: a function that a configuration names.

    rewards:
      functions:
        - name: math                                        # a registered one
        - name: examples/custom_reward.py:reward_brevity    # FILE.py:function, or package.module:function
          weight: 0.2
          options: {budget: 400}                            # keyword arguments

It is called in a worker process with all completions of one prompt (lists of equal length) and returns one
finite number for each. It may take `rewards.timeout_seconds` per call. Where a call takes longer, or kills
its process, it is made again for each completion alone, and the ones at fault score `rewards.failure_value`.
A function that raises, or that returns NaN or a wrong number of values, is a mistake: the run stops and says
which function, prompt and line.
"""

from megagrpo.types import Completion, Prompt


def reward_brevity(prompts: list[Prompt], completions: list[Completion], budget: int = 400) -> list[float]:
    """Return 1.0 for an empty completion, falling linearly to 0.0 at `budget` characters; 0.0 where the
    length limit cut it off.

    Args:
        prompts: the prompt of each completion: `.text`, `.columns` (the other columns of its row), `.id`.
        completions: `.text`, `.token_ids`, `.finish_reason` ("stop" or "length").
        budget: characters.
    """
    return [
        max(0.0, 1.0 - len(completion.text) / budget) if completion.finish_reason == "stop" else 0.0
        for _, completion in zip(prompts, completions, strict=True)
    ]
