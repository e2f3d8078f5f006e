"""A mixture through the pipeline: what the engine is asked for, what rewards say, and what a resume keeps."""

import pytest

from megagrpo.config.load import load_config
from megagrpo.config.rollout_sections import CurriculumConfig, RewardsConfig
from megagrpo.errors import ConfigError
from megagrpo.planning.checks import verify_config
from megagrpo.rewards.pool import RewardPool
from megagrpo.rollout.curriculum import Curriculum
from megagrpo.rollout.in_flight import sampling_by_source
from megagrpo.rollout.rollout_metrics import compute_rollout_metrics
from megagrpo.types import Completion, Prompt, SamplingParams

QUICKSTART = "examples/quickstart/quickstart.yaml"
TASK = "examples/quickstart/task.py"


def mixture(*more):
    sources = (
        f"[{{name: short, source: '{TASK}:train_rows', max_new_tokens: 3, stop: ['x']}},"
        f" {{name: long, source: '{TASK}:eval_rows'}}]"
    )
    return load_config(QUICKSTART, ["data.source=''", f"data.mixture={sources}", *more])


def test_a_source_is_sampled_by_its_own_values_and_others_by_the_runs():
    own = sampling_by_source(mixture().data, SamplingParams(max_new_tokens=8, stop=("y",), seed=5))
    assert own == {"short": SamplingParams(max_new_tokens=3, stop=("x",), seed=5)}


def test_the_longest_source_says_how_long_a_sequence_can_be():
    config = mixture("data.mixture.1.max_new_tokens=99")
    assert config.longest_sequence_tokens == config.data.max_prompt_tokens + 99


def test_the_engine_is_asked_with_each_sources_own_limits(build_pipeline, engine):
    asked = []
    generate = engine.generate

    def note(prompts, sampling, *rest):
        asked.append((sorted(prompt.id for prompt in prompts), sampling.max_new_tokens, sampling.stop))
        return generate(prompts, sampling, *rest)

    engine.generate = note
    prompts = [Prompt(number, "", (1,), source="short" if number < 2 else "long") for number in range(10)]
    pipeline = build_pipeline(prompts=prompts)
    pipeline.sampler.source.config = mixture("data.shuffle=false").data
    pipeline.sampler.shuffle = False
    pipeline.collect(1, weight_version=0)
    assert sorted(asked) == [([0, 1], 3, ("x",)), ([2], 8, ())]


def test_the_step_tells_pass_rates_by_source_and_what_the_curriculum_knows(build_pipeline, engine):
    """The reward of a completion is its index: 0 and 1, so half of them are right and no group is solved."""
    prompts = [Prompt(number, "", (1,), source="even" if number % 2 == 0 else "odd") for number in range(10)]
    pipeline = build_pipeline(prompts=prompts)
    pipeline.sampler.shuffle = False
    pipeline.sampler.curriculum = Curriculum(CurriculumConfig(skip_solved=1.0), prompts, seed=0)
    rollouts, counts = pipeline.collect(1, weight_version=0)
    metrics = compute_rollout_metrics(rollouts, counts, 0)
    assert (metrics["source/even/groups"], metrics["source/odd/groups"]) == (2, 1)
    assert metrics["source/even/pass_rate"] == metrics["source/odd/pass_rate"] == 0.5
    assert metrics["data/solved_prompts"] == metrics["data/unsolved_prompts"] == 0


def test_a_resumed_run_passes_over_what_the_first_would_have_passed_over(build_pipeline, engine, tmp_path):
    """Rewards of one completion a group are all equal: index 0 is worth 0, so every prompt is unsolved."""

    def build():
        pipeline = build_pipeline("rollout.completions_per_prompt=1")
        prompts = pipeline.sampler.source.prompts
        pipeline.sampler.curriculum = Curriculum(CurriculumConfig(skip_unsolved=0.7), prompts, seed=0)
        return pipeline

    def ids(pipeline, *steps):
        return [[prompt.id for prompt in pipeline.collect(step, 0)[0].prompts] for step in steps]

    whole, first, second = build(), build(), build()
    drawn = ids(whole, 1, 2, 3, 4)
    ids(first, 1, 2)
    second.restore(first.snapshot().state, tmp_path)
    assert ids(second, 3, 4) == drawn[2:]
    assert whole.sampler.state() > 12  # some were passed over


@pytest.mark.parametrize(("source", "parts"), [("a", {"exact_match": 1.0, "length": None})])
def test_a_reward_has_no_opinion_on_sources_that_are_not_its_own(source, parts):
    import numpy as np

    functions = [{"name": "exact_match", "sources": ["a"]}, {"name": "length", "sources": ["b"]}]
    prompts = [Prompt(0, "", (1,), {"answer": "7"}, "a"), Prompt(1, "", (1,), {}, "b"), Prompt(2, "", (1,))]
    completions = [
        Completion.sampled(n, 0, np.arange(2), np.zeros(2, np.float32), "stop", ((0, 0),), "7")
        for n in range(3)
    ]
    with RewardPool(RewardsConfig(functions=functions), {"data.mixture": prompts}) as pool:
        first, second, third = pool.score(prompts, completions)
    assert dict(first.parts) == parts and (first.value, first.first, first.answer) == (1.0, 1.0, "7")
    assert dict(second.parts) == {"exact_match": None, "length": 1.0}  # which has no column `answer`
    assert (second.value, second.outcome, second.answer) == (1.0, "ok", None)
    assert (third.outcome, third.detail) == ("error", "no reward has an opinion")


def test_a_reward_of_an_unknown_source_and_a_source_without_a_reward_are_mistakes():
    config = mixture("rewards.functions.0.sources=[shrt]")
    with pytest.raises(ConfigError) as raised:
        verify_config(config, 2)
    assert raised.value.problems == [
        "rewards.functions.0.sources: shrt: no source of data.mixture; did you mean short?; they are "
        "short, long",
        "data.mixture.0.name: short: no reward scores it (rewards.functions.N.sources)",
        "data.mixture.1.name: long: no reward scores it (rewards.functions.N.sources)",
    ]


def test_a_missing_file_of_a_mixture_is_named_by_its_field():
    config = mixture("data.mixture.1.source=nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"data.mixture.1.source: nowhere.jsonl: no such file"):
        verify_config(config, 2)
