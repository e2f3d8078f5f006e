"""Sources with weights: shares, epochs and resumes, and what the curriculum passes over."""

import json
from collections import Counter

import pytest

from megagrpo.config.rollout_sections import CurriculumConfig, DataConfig
from megagrpo.errors import UserError
from megagrpo.rollout.curriculum import Curriculum
from megagrpo.rollout.group_results import GroupResult, metrics_by_source
from megagrpo.rollout.mixture import MixtureCycle
from megagrpo.rollout.prompts import PromptSampler, PromptSource, prompts_by_field
from megagrpo.types import Prompt

ROWS = {"algebra": 6, "geometry": 3, "chess": 1}


@pytest.fixture
def load(tmp_path, character_tokenizer):
    """A function (weights or None, **data fields) -> PromptSource over three files."""

    def load(weights=None, **fields):
        mixture = []
        for place, (name, count) in enumerate(ROWS.items()):
            path = tmp_path / f"{name}.jsonl"
            path.write_text(
                "".join(json.dumps({"prompt": f"{name} {row}", "answer": row}) + "\n" for row in range(count))
            )
            entry = {"name": name, "source": str(path)}
            mixture.append(entry | ({"weight": weights[place]} if weights else {}))
        return PromptSource(DataConfig(mixture=tuple(mixture), **fields), character_tokenizer, 4)

    return load


@pytest.mark.parametrize("weights", [[1.0, 1.0], [2.0, 1.0], [0.5, 0.3, 0.2], [0.07, 1.0]])
def test_every_stretch_of_a_cycle_has_each_source_as_often_as_its_weight_up_to_one(weights):
    cycle = MixtureCycle(weights)
    seen = Counter()
    for position in range(3 * sum(cycle.counts)):
        source, draw = cycle.locate(position)
        assert draw == seen[source]  # each source's draws come in their order
        seen[source] += 1
        for number, weight in enumerate(weights):
            wanted = (position + 1) * weight / sum(weights)
            assert abs(seen[number] - wanted) <= 1, (position, number)


def test_weights_that_need_too_long_a_cycle_are_refused():
    with pytest.raises(UserError, match=r"data.mixture: weights 1e-06, 1: .*round the weights"):
        MixtureCycle([0.000001, 1.0])


def test_a_mixture_without_weights_uses_every_prompt_once_an_epoch(load):
    sampler = PromptSampler(load(), seed=3)
    for _ in range(2):
        drawn = [prompt.id for prompt in sampler.next(10)]
        assert sorted(drawn) == list(range(10)) and drawn != sorted(drawn)
    assert sampler.epoch == 2.0


def test_with_weights_every_source_has_epochs_of_its_own(load):
    drawn = PromptSampler(load(weights=[0.5, 0.3, 0.2]), seed=3).next(60)
    assert Counter(prompt.source for prompt in drawn) == {"algebra": 30, "geometry": 18, "chess": 12}
    for name, count in ROWS.items():
        own = [prompt.text for prompt in drawn if prompt.source == name]
        for start in range(0, len(own) - count + 1, count):
            assert sorted(own[start : start + count]) == sorted(f"{name} {row}" for row in range(count))


def test_a_run_that_goes_on_draws_what_the_first_would_have_drawn(load):
    source = load(weights=[0.5, 0.3, 0.2])
    whole = PromptSampler(source, seed=3).next(40)
    resumed = PromptSampler(source, seed=3)
    resumed.load_state(17)
    assert resumed.next(23) == whole[17:]


def test_prompts_know_their_source_and_their_field(load):
    source = load()
    assert [prompt.id for prompt in source.prompts] == list(range(10))
    assert source.with_id(7).text == "geometry 1"
    sets = prompts_by_field(source, [])
    assert {place: len(prompts) for place, prompts in sets.items()} == {
        "data.mixture.0.source": 6,
        "data.mixture.1.source": 3,
        "data.mixture.2.source": 1,
    }
    assert {prompt.source for prompt in sets["data.mixture.1.source"]} == {"geometry"}


def test_an_overlong_row_is_named_by_its_source_and_dropped_rows_keep_ids_apart(load):
    with pytest.raises(UserError, match=r"data.mixture.1.source: .*geometry.jsonl, row 0: the prompt has 10"):
        load(max_prompt_tokens=9)
    with pytest.raises(UserError, match=r"data.mixture.1.source: .*: no prompts: all 3 rows"):
        load(max_prompt_tokens=9, overlong_prompts="drop")


def test_a_mixture_is_a_choice_and_its_sources_are_told_apart():
    one = {"name": "a", "source": "a.jsonl"}
    for fields, problem in [
        ({}, "source or mixture: one of the two"),
        ({"source": "a.jsonl", "mixture": [one]}, "source or mixture: one of the two"),
        ({"mixture": [one, one]}, "a name of its own"),
        ({"mixture": [one, {"name": "b", "source": "b", "weight": 1.0}]}, "all sources have a weight"),
    ]:
        with pytest.raises(ValueError, match=problem):
            DataConfig(**fields)


# ---- curriculum


def result(prompt_id, *, reward=1.0, is_equal=True, source="", right=2):
    return GroupResult(prompt_id, source, is_equal, reward, completions=4, right=right, tokens=40)


def build_curriculum(**fields):
    prompts = [Prompt(number, "", (1,)) for number in range(1000)]
    return prompts, Curriculum(CurriculumConfig(**fields), prompts, seed=0)


def test_solved_and_unsolved_prompts_are_passed_over_as_often_as_set():
    """1,000 visits with p = 0.75: within 4 standard deviations."""
    prompts, curriculum = build_curriculum(skip_solved=0.75, skip_unsolved=0.25)
    kinds = {"solved": (1.0, True, 0.75), "unsolved": (0.0, True, 0.25), "mixed": (1.0, False, 0.0)}
    for reward, is_equal, share in kinds.values():
        curriculum.observe([result(prompt.id, reward=reward, is_equal=is_equal) for prompt in prompts])
        skipped = sum(curriculum.passes_over(prompt, 5) for prompt in prompts)
        assert abs(skipped - 1000 * share) <= 4 * (1000 * share * (1 - share)) ** 0.5
    assert curriculum.counts() == {"data/solved_prompts": 0, "data/unsolved_prompts": 0}


def test_a_prompt_that_is_unknown_is_never_passed_over_and_off_is_off():
    prompts, curriculum = build_curriculum(skip_solved=1.0)
    assert not any(curriculum.passes_over(prompt, 0) for prompt in prompts)
    _, off = build_curriculum()
    off.observe([result(0)])
    assert not off.is_on and off.counts() == {}


def test_what_is_known_of_the_prompts_goes_with_the_checkpoint():
    prompts, curriculum = build_curriculum(skip_solved=0.5)
    curriculum.observe([result(prompt.id) for prompt in prompts[::2]])
    _, resumed = build_curriculum(skip_solved=0.5)
    resumed.load_state(json.loads(json.dumps(curriculum.state())))
    visits = [(prompt, position) for position in range(3) for prompt in prompts]
    assert [resumed.passes_over(*each) for each in visits] == [
        curriculum.passes_over(*each) for each in visits
    ]
    assert resumed.counts()["data/solved_prompts"] == 500


def test_the_sampler_skips_what_is_solved_and_goes_on_where_everything_is(load):
    sampler = PromptSampler(load(curriculum={"skip_solved": 1.0}), seed=3)
    sampler.curriculum.observe([result(number) for number in range(9)])
    assert [prompt.id for prompt in sampler.next(2)] == [9, 9]
    sampler.curriculum.observe([result(9)])
    assert len(sampler.next(4)) == 4


# ---- metrics


def test_pass_rates_are_told_by_source_where_there_are_several():
    groups = [
        result(0, source="a", right=4),
        result(1, source="a", right=1),
        result(2, source="b/c", right=0),
    ]
    assert metrics_by_source(groups) == {
        "source/a/groups": 2,
        "source/a/pass_rate": 5 / 8,
        "source/a/completion_tokens": 10.0,
        "source/b_c/groups": 1,
        "source/b_c/pass_rate": 0.0,
        "source/b_c/completion_tokens": 10.0,
    }
    assert metrics_by_source(groups[:2]) == {}
