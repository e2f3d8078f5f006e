"""A user's reward is called by name, with what other trainers call things, and what it returns is read
strictly.
"""

import pytest

from megagrpo.config.rollout_sections import RewardConfig, RewardsConfig
from megagrpo.errors import UserError
from megagrpo.rewards.build import build_scorer
from megagrpo.rewards.messages import RewardSpec, Score
from megagrpo.rewards.pool import RewardPool
from megagrpo.types import Prompt


@pytest.fixture
def call(tmp_path, make_group):
    """Return a function (source, texts, options, columns) -> scores, in this process; the source defines
    `reward`.
    """
    numbers = iter(range(1000))

    def call_reward(source: str, *texts: str, options: dict | None = None, **columns) -> list[Score]:
        path = tmp_path / f"reward_{next(numbers)}.py"
        path.write_text(source)
        return build_scorer(RewardSpec(f"{path}:reward", options or {}))(*make_group(*texts, **columns))

    return call_reward


# signatures as in TRL's documentation and as users write them: all call for the same answer
FORMS = {
    "trl": "def reward(completions, answer, **kwargs):\n"
    "    return [float(c == a) for c, a in zip(completions, answer)]",
    "trl_with_prompts": "def reward(prompts, completions, answer, **kwargs):\n"
    "    assert prompts == ['question'] * 2\n    return [float(c == a) for c, a in zip(completions, answer)]",
    "keyword_only": "def reward(*, answer, completions):\n"
    "    return [float(c == a) for c, a in zip(completions, answer)]",
    "rest_alone": "def reward(**given):\n"
    "    return [float(c == a) for c, a in zip(given['completions'], given['answer'])]",
    "objects": "def reward(prompts, completions):\n"
    "    return [float(c.text == p.columns['answer']) for p, c in zip(prompts, completions)]",
    "class": "class Reward:\n    def __call__(self, completions, answer):\n"
    "        return [float(c == a) for c, a in zip(completions, answer)]\nreward = Reward()",
    "coroutine": "import asyncio\nasync def reward(completions, answer):\n    await asyncio.sleep(0)\n"
    "    return [float(c == a) for c, a in zip(completions, answer)]",
    "array": "import numpy\ndef reward(completions, answer):\n"
    "    return numpy.array([c == a for c, a in zip(completions, answer)], numpy.float32)",
    "generator": "def reward(completions, answer):\n"
    "    yield from (c == a for c, a in zip(completions, answer))",
}


@pytest.mark.parametrize("form", FORMS)
def test_every_usual_form_of_a_reward_is_called_right(call, form):
    scores = call(FORMS[form], "7", "8", answer="7", other="x")
    assert [score.value for score in scores] == [1.0, 0.0]


def test_rest_takes_the_columns_that_no_parameter_names(call):
    source = (
        "def reward(completions, answer, **rest):\n"
        "    assert sorted(rest) == ['completion_ids', 'level', 'prompts'], rest\n"
        "    return rest['level']"
    )
    assert [score.value for score in call(source, "a", "b", answer="7", level=3)] == [3.0, 3.0]


def test_an_option_takes_the_place_of_a_column_and_a_column_that_of_a_default(call):
    source = (
        "def reward(completions, scale, bonus=5.0):\n"
        "    bonus = bonus if isinstance(bonus, float) else bonus[0]\n"
        "    return [scale + bonus for _ in completions]"
    )
    assert call(source, "a", options={"scale": 2.0}, scale=100.0)[0].value == 7.0
    assert call(source, "a", options={"scale": 2.0}, bonus=1)[0].value == 3.0


def test_completions_carry_their_tokens_and_their_end(call):
    source = (
        "def reward(completions, completion_ids):\n"
        "    assert [list(c.token_ids) for c in completions] == completion_ids\n"
        "    return [float(c.finish_reason == 'stop') + c.completion_index for c in completions]"
    )
    assert [score.value for score in call(source, "a", "b")] == [1.0, 2.0]


def test_one_event_loop_serves_all_calls(tmp_path, make_group):
    path = tmp_path / "loops.py"
    path.write_text(
        "import asyncio\nloops = []\nasync def reward(completions):\n"
        "    loops.append(asyncio.get_running_loop())\n    return [float(loops[0] is loops[-1])]"
    )
    scorer = build_scorer(RewardSpec(f"{path}:reward"))
    assert [scorer(*make_group("a"))[0].value for _ in range(3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("None", Score(None)),
        ("True", Score(1.0)),
        ("{'correct': 1.0, 'tone': 0.25}", Score(1.25, {"correct": 1.0, "tone": 0.25})),
        ("{'score': 0.5, 'pred': 3}", Score(0.5, {"pred": 3.0})),
        ("__import__('numpy').float32(0.5)", Score(0.5)),
    ],
)
def test_a_score_is_a_number_none_or_a_mapping_of_parts(call, returned, expected):
    assert call(f"def reward(completions):\n    return [{returned}]", "a") == [expected]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("['1.0']", r"completion 0: returned '1\.0' \(str\); a number, None"),
        ("[{'tone': '1'}]", r"completion 0, part 'tone': returned '1' \(str\)"),
        ("[{}]", "an empty mapping"),
        ("[[1.0]]", r"returned \[1\.0\] \(list\)"),
        ("'1'", r"returned '1' \(str\); a list with one entry per completion"),
        ("{'a': [1.0]}", r"\(dict\); a list with one entry per completion"),
        ("1.0", r"returned 1\.0 \(float\); a list"),
        ("[1j]", r"\(complex\)"),
        ("[{'score': float('nan')}]", "part 'score': returned nan; a finite number is needed"),
    ],
)
def test_anything_else_is_refused_by_name(call, returned, message):
    with pytest.raises(UserError, match=message):
        call(f"def reward(completions):\n    return {returned}", "a")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (
            "def reward(data_source, solution_str, ground_truth, extra_info=None): ...",
            {},
            "is verl's form, one completion a call; wrap it: def reward",
        ),
        (
            "def reward(texts): ...",
            {},
            r"\(texts\) has no parameter `completions`; a reward is called by name",
        ),
        ("def reward(completions, /): ...", {}, "'completions' can't be given by name"),
        (
            "def reward(completions, budget=3): ...",
            {"budgett": 1},
            "option 'budgett' is no .*: budget",
        ),
        ("def reward(completions): ...", {"completions": 1}, "option 'completions' is no parameter"),
    ],
)
def test_a_signature_that_breaks_the_contract_is_told_before_anything_is_scored(
    tmp_path, source, options, message
):
    (tmp_path / "wrong.py").write_text(source)
    with pytest.raises(UserError, match=message):
        build_scorer(RewardSpec(f"{tmp_path / 'wrong.py'}:reward", options))


def test_a_parameter_that_is_no_column_is_named_beside_the_columns(call):
    with pytest.raises(UserError, match="'gold' is neither an option nor a column; the columns: answer"):
        call("def reward(completions, gold): ...", "a", answer="7")


def test_an_unreachable_judge_is_a_counted_outcome(open_pool, write_reward, make_group):
    body = 'if "down" in completions:\n    raise ConnectionError("judge")\nreturn [1.0] * len(completions)'
    rewards = open_pool(write_reward(body)).score(*make_group("a", "down"))
    assert [reward.outcome for reward in rewards] == ["ok", "unreachable"]
    assert rewards[1].detail == "reward: ConnectionError: judge"


def test_no_opinion_leaves_the_value_to_the_other_rewards(open_pool, write_reward, make_group):
    name = write_reward("return [None, 2.0]")
    pool = open_pool(RewardConfig(name=name, weight=3.0), "exact_match")
    rewards = pool.score(*make_group("7", "8", answer="7"))
    assert [reward.value for reward in rewards] == [1.0, 6.0]
    assert [reward.parts["reward"] for reward in rewards] == [None, 2.0]


def test_no_opinion_at_all_is_a_counted_failure(open_pool, write_reward, make_group):
    (reward,) = open_pool(write_reward("return [None]")).score(*make_group("a"))
    assert (reward.value, reward.outcome, reward.detail) == (-5.0, "error", "no reward has an opinion")


def test_parts_reach_the_reward_under_its_name(open_pool, write_reward, make_group):
    (reward,) = open_pool(write_reward("return [{'tone': 0.5, 'length': 1.0}]")).score(*make_group("a"))
    assert (reward.value, reward.subparts) == (1.5, {"reward/tone": 0.5, "reward/length": 1.0})


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("custom", r"data\.source: reward .*: its parameter 'answer' is neither .* the columns: gold"),
        ("math", r"data\.source: reward 'math': there is no column 'answer'; the columns: gold"),
        ("exact_match", r"data\.source: reward 'exact_match': there is no column 'answer'"),
    ],
)
def test_a_column_that_the_data_lacks_is_told_before_anything_is_scored(tmp_path, reward, message):
    path = tmp_path / "needs_answer.py"
    path.write_text("def reward(completions, answer, bonus=1.0): ...")
    config = RewardsConfig(functions=[{"name": f"{path}:reward" if reward == "custom" else reward}])
    with pytest.raises(UserError, match=message):
        RewardPool(config, {"data.source": [Prompt(0, "", (1,), {"gold": 1})]})
    RewardPool(config, {"data.source": [Prompt(0, "", (1,), {"gold": 1, "answer": 1})]}).close()
