"""Rewards of your own: functions that a configuration names.

    rewards:
      functions:
        - name: math                                        # a registered one
        - name: examples/custom_reward.py:reward_brevity    # FILE.py:function, or package.module:function
          weight: 0.2
          options: {budget: 400}                            # keyword arguments

A function is called by name, in a worker process, with all completions of one prompt: lists of equal length.
Its parameters may be `prompts`, `completions`, `completion_ids`, its options and any column of the data;
`**rest` receives the other columns. It returns one entry per completion: a finite number, None (no opinion),
or a mapping of parts. It may take `rewards.timeout_seconds` per call. Where a call takes longer, or kills its
process, it is made again for each completion alone, and the ones at fault score `rewards.failure_value`. A
function that raises, or that returns NaN or a wrong number of entries, is a mistake: the run stops and says
which function, prompt and line.
"""

import asyncio

from megagrpo.rewards.texts import CompletionText


def reward_brevity(completions: list[CompletionText], budget: int = 400) -> list[float]:
    """Return 1.0 for an empty completion, falling linearly to 0.0 at `budget` characters; 0.0 where the
    length limit cut it off.

    Args:
        completions: texts that carry `.token_ids` and `.finish_reason` ("stop" or "length").
        budget: characters; an option.
    """
    return [
        max(0.0, 1.0 - len(completion) / budget) if completion.finish_reason == "stop" else 0.0
        for completion in completions
    ]


def reward_contains(completions, answer, **rest) -> list[float]:
    """Return whether the column `answer` stands in the completion. The form of TRL's rewards."""
    return [float(str(gold) in text) for text, gold in zip(completions, answer, strict=True)]


def reward_steps(completions) -> list[dict[str, float]]:
    """Return parts, which add up and are logged as `reward/reward_steps/PART`."""
    return [
        {"numbered": 0.5 * ("1." in text), "concluded": 0.5 * ("therefore" in text.lower())}
        for text in completions
    ]


def reward_ascii(completions) -> list[float | None]:
    """Return whether the text is plain; None, no opinion, for an empty one."""
    return [float(text.isascii()) if text else None for text in completions]


async def reward_judge(prompts, completions) -> list[float]:
    """Ask a judge about all completions at once. Put your client in the place of `ask`; a TimeoutError or
    ConnectionError of it counts as a failed score. `rewards.network: true` lets it reach the judge, and
    `rewards.environment: [JUDGE_KEY]` gives it the key.
    """

    async def ask(prompt: str, completion: str) -> float:
        await asyncio.sleep(0)
        return float(bool(prompt) and completion.strip().endswith("."))

    return await asyncio.gather(*map(ask, prompts, completions))
