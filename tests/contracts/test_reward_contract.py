"""Every registered reward keeps the contract of `megagrpo/rewards/reward.py`. A new reward adds one line
to CASES.
"""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megagrpo.errors import UserError
from megagrpo.rewards.build import build_scorer
from megagrpo.rewards.messages import RewardSpec
from megagrpo.rewards.reward import REWARDS
from megagrpo.types import Completion, Prompt

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from echo_endpoint import echo_endpoint

# reward: (columns of the prompt, a text that scores 1.0, a text that scores 0.0), with default options
CASES = {
    "choice": ({"answer": "B"}, "The answer is B.", "The answer is C."),
    "code": ({"tests": [{"output": "7"}]}, "```python\nprint(7)\n```", "```python\nprint(8)\n```"),
    "exact_match": ({"answer": "7"}, "7", "8"),
    "judge": ({}, "[[10]]", "[[1]]"),
    "format": ({}, "<think>a</think><answer>7</answer>", "7"),
    "language": ({}, "seven", "семь"),
    "length": ({}, "seven", ""),
    "math": ({"answer": "7"}, r"\boxed{7}", r"\boxed{8}"),
    "reward_model": ({}, "good", "bad"),
    "repetition": ({}, "one two three four five", "one " * 20),
}
HARD_TEXTS = (
    "",
    " ",
    "\x00",
    "\\boxed{",
    "</answer>",
    "$" * 50,
    "½ 🙂 東京",
    "<think>" * 200,
    "word " * 2000,
    "-1e999",
    "1/0",
    "\ud800",
)
# options without which a reward can't be built; the endpoint is the module's
OPTIONS = {
    "judge": {"model": "echo", "template": "{completion}", "retries": 0},
    "reward_model": {"template": "{completion}", "retries": 0},
}
EACH = pytest.mark.parametrize("name", REWARDS.names())


@pytest.fixture(scope="module", autouse=True)
def endpoint():
    with echo_endpoint() as endpoint:
        for options in OPTIONS.values():
            options["address"] = endpoint.address
        yield


def score(name: str, text: str, columns: dict) -> float:
    prompt = Prompt(3, "question", (1,), columns)
    tokens = len(text.split())
    completion = Completion.sampled(
        3, 0, np.ones(tokens, int), np.zeros(tokens, np.float32), "stop", ((0, 0),), text
    )
    return build_scorer(RewardSpec(name, OPTIONS.get(name, {})))([prompt], [completion])[0].value


def test_every_registered_reward_has_a_case():
    assert sorted(CASES) == REWARDS.names()


@EACH
def test_right_scores_one_and_wrong_scores_zero_each_time(name):
    columns, right, wrong = CASES[name]
    assert [score(name, text, columns) for text in (right, wrong, right)] == [1.0, 0.0, 1.0]


@EACH
def test_any_text_gets_a_finite_score(name):
    for text in HARD_TEXTS:
        try:
            assert math.isfinite(score(name, text, CASES[name][0])), repr(text[:20])
        except ValueError:  # a counted failure: what answered gave no score
            assert name in OPTIONS


@EACH
def test_an_unknown_option_is_named_beside_the_known_ones(name):
    with pytest.raises(UserError, match=f"options of '{name}': .*'no_such_option'; options: "):
        build_scorer(RewardSpec(name, {**OPTIONS.get(name, {}), "no_such_option": 1}))


@EACH
def test_a_missing_column_is_named(name):
    columns, right, _ = CASES[name]
    for column in columns:
        with pytest.raises(UserError, match=f"prompt 3 has no column '{column}'"):
            score(name, right, {key: value for key, value in columns.items() if key != column})


def test_rewards_load_without_torch_and_megatron():
    # a worker must start within two seconds, which an import of torch alone would take
    build = (
        "from megagrpo.rewards import build, messages, worker; [build.build_scorer(messages.RewardSpec(n)) "
        "for n in build.REWARDS.names() if n not in ('judge', 'reward_model')]"
    )
    code = (
        f"import sys; {build}; print([m for m in ('torch', 'megatron', 'pydantic', 'transformers') if m "
        "in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
