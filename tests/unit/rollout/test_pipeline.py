"""When a step's rollouts are generated, under which weights, and what of them a checkpoint keeps."""

import json
import re
import threading

import numpy as np
import pytest

from megagrpo.rollout.generation import RolloutFailedError

ONE_STEP_OFF = "rollout.off_policy=one_step_off"


def train(pipeline, engine, first, last):
    """The loop's order of calls; returns per step what it trained on."""
    trained = []
    for step in range(first, last + 1):
        rollouts, _ = pipeline.collect(step, weight_version=engine.version)
        trained.append(describe(rollouts))
        pipeline.wait()
        engine.version += 1
    return trained


def describe(rollouts):
    return [
        (
            rollouts.prompts[key[0]].id,
            c.index,
            c.token_ids.tolist(),
            c.logprobs.tolist(),
            c.weight_versions,
            rollouts.records[key].reward,
        )
        for key, c in sorted(rollouts.local.items())
    ]


def versions(trained):
    return [{completion[4][0][1] for completion in step} for step in trained]


def restored(pipeline, snapshot, folder, next_step):
    for name, contents in snapshot.files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(contents)
    pipeline.restore(json.loads(json.dumps(snapshot.state)) | {"next_step": next_step}, folder)
    return pipeline


def test_synchronous_rollouts_come_from_the_weights_that_are_trained(build_pipeline, engine):
    assert versions(train(build_pipeline(), engine, 1, 4)) == [{0}, {1}, {2}, {3}]


def test_one_step_off_rollouts_come_from_the_weights_before(build_pipeline, engine):
    assert versions(train(build_pipeline(ONE_STEP_OFF), engine, 1, 4)) == [{0}, {0}, {1}, {2}]


def test_the_same_prompts_and_draws_are_used_in_both_modes(build_pipeline, engine):
    """The mode changes the weights that sample, and nothing else; nothing is generated that no step trains
    on.
    """
    train(build_pipeline(), engine, 1, 4)
    synchronous, engine.asked, engine.version = engine.asked, [], 0
    train(build_pipeline(ONE_STEP_OFF), engine, 1, 4)
    assert engine.asked == synchronous and len(synchronous) == 4 * 3 * 2


def test_the_next_step_is_generated_while_this_one_is_trained(build_pipeline, engine):
    """The engine is held at the next step's first prompt: `collect` returns all the same."""
    may_go_on = threading.Event()
    pipeline = build_pipeline(ONE_STEP_OFF)
    collected = []
    engine.before = lambda prompt: len(engine.asked) >= 6 and may_go_on.wait(30.0)
    train_thread = threading.Thread(target=lambda: collected.append(pipeline.collect(1, 0)))
    train_thread.start()
    train_thread.join(30.0)
    assert len(collected) == 1 and {step for step, _, _ in engine.asked} == {1}
    may_go_on.set()
    pipeline.wait()
    assert {step for step, _, _ in engine.asked} == {1, 2}


@pytest.mark.parametrize("mode", ["synchronous", "one_step_off"])
def test_a_resumed_run_trains_on_the_same_completions(build_pipeline, engine, tmp_path, mode):
    mode = f"rollout.off_policy={mode}"
    whole = train(build_pipeline(mode), engine, 1, 4)
    engine.version = 0
    first = build_pipeline(mode)
    before = train(first, engine, 1, 2)
    engine.asked = []
    second = restored(build_pipeline(mode), first.snapshot(), tmp_path, next_step=3)
    assert before + train(second, engine, 3, 4) == whole
    saved_ahead = 6 if "one_step_off" in mode else 0  # those in flight came from the file
    assert len(engine.asked) == 12 - saved_ahead


def test_what_a_snapshot_holds_is_what_the_format_version_stands_for(build_pipeline, engine):
    """Where this changes, checkpoint.manifest.FORMAT_VERSION is raised: tests/unit/checkpoint says how."""
    pipeline = build_pipeline(ONE_STEP_OFF)
    pipeline.collect(1, weight_version=0)
    state = pipeline.snapshot().state
    assert list(state) == ["data", "next_step", "prompt_position", "lengths", "in_flight"]
    assert list(state["data"]) == ["prompts", "sha256", "columns"]
    assert list(state["in_flight"]) == ["request", "prompt_ids", "prompts_drawn", "num_files"]
    pipeline.wait()


def test_rollouts_that_failed_are_not_saved_and_their_prompts_not_lost(build_pipeline, engine, tmp_path):
    def fail(prompt):
        if len(engine.asked) >= 6:
            raise RuntimeError("the engine is gone")

    engine.before = fail
    pipeline = build_pipeline(ONE_STEP_OFF)
    pipeline.collect(1, 0)
    snapshot = pipeline.snapshot()
    assert (snapshot.state["prompt_position"], snapshot.state["in_flight"]) == (3, None)
    assert snapshot.files() == {}
    with pytest.raises(RolloutFailedError, match="rank 0: RuntimeError: the engine is gone"):
        pipeline.collect(2, 1)
    assert pipeline.snapshot().state["prompt_position"] == 3  # and after the failure too


def test_a_synchronous_failure_leaves_the_position_before_its_prompts(build_pipeline, engine):
    pipeline = build_pipeline()
    train(pipeline, engine, 1, 2)
    engine.before = lambda prompt: 1 / 0
    with pytest.raises(RolloutFailedError, match="ZeroDivisionError"):
        pipeline.collect(3, 2)
    assert pipeline.snapshot().state["prompt_position"] == 6


@pytest.mark.parametrize(
    "change", ["rollout.off_policy=synchronous", "rollout.temperature=0.5", "rollout.prompts_per_step=2"]
)
def test_saved_rollouts_that_this_run_would_not_ask_for_are_drawn_again(
    build_pipeline, engine, tmp_path, change
):
    first = build_pipeline(ONE_STEP_OFF)
    first.collect(1, 0)
    snapshot = first.snapshot()
    assert (snapshot.state["prompt_position"], snapshot.state["in_flight"]["prompts_drawn"]) == (3, 6)
    engine.version, engine.asked = 1, []
    second = restored(build_pipeline(ONE_STEP_OFF, change), snapshot, tmp_path, next_step=2)
    rollouts, _ = second.collect(2, 1)
    second.wait()
    prompts = [first.sampler._prompt_at(position).id for position in range(3, 6)]
    assert [prompt.id for prompt in rollouts.prompts] == prompts[: len(rollouts.prompts)]
    assert {record.weight_version for record in rollouts.records.values()} == {1}


def test_refills_come_from_the_newest_weights_and_before_the_next_steps_prompts(build_pipeline, engine):
    """Groups without a signal are drawn again by the step that they are missing in, before the next step's
    prompts are drawn.
    """
    pipeline = build_pipeline(
        ONE_STEP_OFF, "algorithm.dynamic_sampling.enabled=true", "algorithm.dynamic_sampling.max_refills=1"
    )
    dull = {pipeline.sampler._prompt_at(position).id for position in (0, 3, 4)}
    scored = pipeline.generator.rewards.submit

    def submit(prompts, completions):
        future = scored(prompts, completions)
        if prompts[0].id in dull:
            future._result = [future.result()[0]] * len(completions)
        return future

    pipeline.generator.rewards.submit = submit
    order = [pipeline.sampler._prompt_at(position).id for position in range(10)]
    rollouts, counts = pipeline.collect(1, 0)
    # positions 0 to 2, of which 0 is dull; the refill takes 3, dull too: two groups are left
    assert [prompt.id for prompt in rollouts.prompts] == [order[1], order[2]] and counts.refills == 1
    pipeline.wait()
    engine.version = 1
    # positions 4 to 6 were in flight, 4 is dull; the refill takes 7
    rollouts, counts = pipeline.collect(2, 1)
    assert [prompt.id for prompt in rollouts.prompts] == [order[5], order[6], order[7]]
    assert [rollouts.records[group, 0].weight_version for group in range(3)] == [0, 0, 1]


def test_completions_of_weights_older_than_the_mode_allows_are_refused(build_pipeline, engine):
    pipeline = build_pipeline()
    message = "under weight version 0, the actor is at 1; rollout.off_policy synchronous allows an age of 0"
    with pytest.raises(RolloutFailedError, match=re.escape(message)):
        pipeline.collect(1, weight_version=1)


def test_closing_ends_what_is_in_flight(build_pipeline, engine):
    pipeline = build_pipeline(ONE_STEP_OFF)

    def until_aborted(prompt):
        while len(engine.asked) >= 6 and not engine.aborted:
            pass

    engine.before = until_aborted
    pipeline.collect(1, 0)
    pipeline.close()
    assert engine.aborted


def test_what_is_in_flight_is_given_up_where_the_run_goes_elsewhere(build_pipeline, engine):
    """As after a roll-back: on with the prompts behind the last collected step, under the newest weights."""
    pipeline = build_pipeline(ONE_STEP_OFF)
    pipeline.collect(1, 0)
    assert pipeline.next_position == 3
    pipeline.skip_to(pipeline.next_position)
    engine.version = 5
    rollouts, _ = pipeline.collect(2, 5)
    assert [prompt.id for prompt in rollouts.prompts] == [
        pipeline.sampler._prompt_at(position).id for position in range(3, 6)
    ]
    assert {record.weight_version for record in rollouts.records.values()} == {5}
    pipeline.wait()


def test_shares_of_more_ranks_are_dealt_out_whole(build_pipeline, engine, tmp_path):
    """Three files read by two ranks, and by one: every completion comes once, bit for bit."""
    from megagrpo.rollout.in_flight import ScoredCompletions, file_name, pack_share, read_shares

    pipeline = build_pipeline()
    rollouts, _ = pipeline.collect(1, 0)
    share = {key: (completion, rollouts.records[key].reward) for key, completion in rollouts.local.items()}
    for number in range(3):
        mine = {key: value for key, value in share.items() if key[0] == number}
        path = tmp_path / file_name(number)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(
            pack_share(
                ScoredCompletions({k: c for k, (c, _) in mine.items()}, {k: r for k, (_, r) in mine.items()})
            )
        )
    for world_size in (1, 2, 3, 5):
        parts = [read_shares(tmp_path, 3, rank, world_size) for rank in range(world_size)]
        keys = [key for part in parts for key in part.completions]
        assert sorted(keys) == sorted(share)
        for part in parts:
            for key, completion in part.completions.items():
                expected, reward = share[key]
                np.testing.assert_array_equal(completion.token_ids, expected.token_ids)
                np.testing.assert_array_equal(completion.logprobs, expected.logprobs)
                assert completion.logprobs.dtype == np.float32 and part.rewards[key] == reward
                assert (completion.text, completion.weight_versions) == (
                    expected.text,
                    expected.weight_versions,
                )
