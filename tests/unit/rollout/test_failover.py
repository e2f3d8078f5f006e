"""Engines that fail: what they have finished is kept, and the rest goes to others."""

import pytest

from megagrpo.engines.base import EngineError, EngineHealth
from megagrpo.errors import SharedUserError, UserError
from megagrpo.rollout.dealing import EngineFailure, ReplicaStates
from megagrpo.rollout.generation import RolloutFailedError, RolloutGenerator
from megagrpo.rollout.in_flight import RolloutRequest
from megagrpo.types import Prompt, SamplingParams

RANKS = 2


@pytest.fixture
def build(ranks, scripted_engine, scripted_rewards):
    """A function -> one generator per rank, each with a replica of its own behind it."""

    def build(is_embedded=False):
        class Groups:
            def __init__(self, rank):
                self.rank, self.world_size = rank, RANKS

        engines = [scripted_engine() for _ in range(RANKS)]
        for engine in engines:
            engine.ready = True
            engine.health = lambda engine=engine: EngineHealth(
                engine.ready, "serving" if engine.ready else "dead", 0, "it was killed"
            )
        return [
            RolloutGenerator(engines[rank], scripted_rewards(), Groups(rank), range(RANKS), is_embedded)
            for rank in range(RANKS)
        ]

    return build


def request():
    return RolloutRequest(
        [Prompt(number, str(number), (1, 2)) for number in range(6)],
        SamplingParams(8),
        completions_per_prompt=2,
    )


def tokens(results):
    """Everything that was generated, wherever it lies; every group once."""
    merged = {}
    for rollouts in results:
        assert not merged.keys() & rollouts.local.keys()
        merged |= {key: (c.prompt_id, c.index, c.token_ids.tolist()) for key, c in rollouts.local.items()}
    assert [list(rollouts.records) for rollouts in results] == [sorted(merged)] * RANKS
    return merged


def dies_at(engine, prompt_id, ready):
    def before(prompt):
        if prompt.id == prompt_id:
            engine.ready = ready
            raise EngineError("the server is gone")

    engine.before = before


def test_a_dead_engines_groups_are_generated_by_another_and_its_finished_ones_kept(ranks, build):
    generators = build()
    whole = tokens(ranks.run(lambda rank: generators[rank].generate(request())))
    dies_at(generators[0].engine, prompt_id=2, ready=False)  # it has 0, 2 and 4: one is finished
    results = ranks.run(lambda rank: generators[rank].generate(request()))
    assert tokens(results) == whole
    assert sorted(results[0].local) == [(0, 0), (0, 1)]
    assert [generator.replicas.lost for generator in generators] == [{0: "the server is gone"}] * RANKS
    results = ranks.run(lambda rank: generators[rank].generate(request()))
    assert results[0].local == {} and tokens(results) == whole  # it gets no prompts until it is back


def test_an_engine_that_still_serves_is_tried_again_after_growing_pauses(ranks, build):
    generators, failures = build(), []
    whole = tokens(ranks.run(lambda rank: generators[rank].generate(request())))

    def twice(prompt):
        if prompt.id in (2, 4) and len(failures) < 2:
            failures.append(prompt.id)
            raise EngineError("timed out")

    for generator in generators:
        generator.engine.before = twice
    notes = [[] for _ in generators]
    for generator, lines in zip(generators, notes, strict=True):
        generator.note = lines.append
    results = ranks.run(lambda rank: generators[rank].generate(request()))
    assert tokens(results) == whole and len(failures) == 2
    assert notes[0] == notes[1]  # one of each, or both of rank 0: as the two threads run
    assert [line.partition(" of rank ")[2][1:] for line in notes[0]] == [" failed: timed out"] * 2
    assert all(generator.replicas.lost == {} for generator in generators)
    assert sum(pause > 0 for pause in ranks.slept) >= RANKS


def test_the_run_ends_on_all_ranks_when_no_engine_is_left(ranks, build):
    generators = build()
    for rank, generator in enumerate(generators):
        dies_at(generator.engine, prompt_id=2 + rank, ready=False)
    errors = ranks.run(lambda rank: generators[rank].generate(request()))
    message = "no rollout engine is left: replica 0: the server is gone; replica 1: the server is gone"
    assert [type(error) for error in errors] == [RolloutFailedError] * RANKS and {
        str(error) for error in errors
    } == {message}


def test_an_embedded_engine_that_fails_ends_the_run_at_once(ranks, build):
    """The others hold the same weights: they would fail too, and hide the cause."""
    generators = build(is_embedded=True)
    dies_at(generators[1].engine, prompt_id=3, ready=True)
    errors = ranks.run(lambda rank: generators[rank].generate(request()))
    assert {str(error) for error in errors} == {"rank 1: EngineError: the server is gone"}


def test_a_users_mistake_is_told_as_one_by_every_rank(ranks, build):
    generators = build()

    def refuse(prompt):
        raise UserError("prompt 3: has no tokens")

    generators[1].engine.before = refuse
    errors = ranks.run(lambda rank: generators[rank].generate(request()))
    assert [type(error) for error in errors] == [SharedUserError] * RANKS and {
        str(error) for error in errors
    } == {"prompt 3: has no tokens"}


def test_a_replica_that_fails_three_times_in_a_row_is_lost():
    states, failure = ReplicaStates([0, 0, 1]), EngineFailure("timed out", is_ready=True)
    assert states.take([failure, None, None], served=[1, 2]) == 0.5
    assert states.take([failure, failure, None], served=[2]) == 1.0 and states.lost == {}
    states.take([None, None, None], served=[2])  # it was not asked, so it has not served
    states.take([None, None, None], served=[1, 2])  # a good round in between
    assert states.take([None, failure, None], served=[0]) == 0.5
    states.take([None, failure, None], served=[])
    states.take([None, failure, None], served=[])
    assert states.lost == {0: "timed out"} and states.is_any_left
    assert [len(groups) for groups in states.deal([1.0] * 4)] == [0, 0, 4]
    states.recover(0)
    assert [len(groups) for groups in states.deal([1.0] * 4)] == [1, 1, 2]


def test_what_a_replica_failed_on_goes_to_others_and_back_to_it_only_where_there_are_none():
    states, failure = ReplicaStates([0, 1]), EngineFailure("timed out", is_ready=True)
    states.take([failure, None], served=[1])
    assert states.deal([1.0] * 4, is_retry=True) == [[], [0, 1, 2, 3]]
    assert [len(groups) for groups in states.deal([1.0] * 4)] == [2, 2]  # the next request is nobody's retry
    states.take([None, failure], served=[0])  # the first one has done well
    assert states.deal([1.0] * 4, is_retry=True) == [[0, 1, 2, 3], []]
    states.take([failure, failure], served=[])
    assert [len(groups) for groups in states.deal([1.0] * 4, is_retry=True)] == [2, 2]


def test_what_fails_a_step_ahead_is_generated_by_others_before_the_weights_change(ranks, build):
    """So it comes from the weights that the rest of its step comes from, and a checkpoint holds all of it."""
    generators = build()
    whole = tokens(ranks.run(lambda rank: generators[rank].generate(request())))
    dies_at(generators[0].engine, prompt_id=2, ready=False)
    settled = ranks.run(lambda rank: generators[rank].settle(generators[rank].start(request())))
    assert sum(len(pending.outcome().completions) for pending in settled) == len(whole)
    for generator in generators:
        generator.engine.version = 1  # published
    results = ranks.run(lambda rank: generators[rank].finish(settled[rank]))
    assert tokens(results) == whole
    assert {record.weight_version for record in results[0].records.values()} == {0}
    assert [generator.replicas.lost for generator in generators] == [{0: "the server is gone"}] * RANKS


def test_what_nobody_is_left_for_is_generated_after_the_publish_that_brings_an_engine_back(ranks, build):
    generators = build()
    whole = tokens(ranks.run(lambda rank: generators[rank].generate(request())))
    for generator, prompt_id in zip(generators, (2, 3), strict=True):
        dies_at(generator.engine, prompt_id, ready=False)
    settled = ranks.run(lambda rank: generators[rank].settle(generators[rank].start(request())))
    assert 0 < sum(len(pending.outcome().completions) for pending in settled) < len(whole)
    for generator in generators:
        generator.engine.before, generator.engine.ready, generator.engine.version = (
            lambda prompt: None,
            True,
            1,
        )
        generator.replicas.recover(0)
    results = ranks.run(lambda rank: generators[rank].finish(settled[rank]))
    assert tokens(results) == whole
    assert {record.weight_version for record in results[0].records.values()} == {0, 1}


def test_a_failure_from_before_a_replica_was_found_again_is_no_news():
    """A step ahead is generated before a publish that brings a lost replica back, and is gathered after
    it.
    """
    states = ReplicaStates([0])
    old = EngineFailure("killed by SIGKILL", is_ready=False, life=states.life(0))
    states.lost[0] = "killed by SIGKILL"
    states.recover(0)
    assert states.take([old], served=[]) == 0.0 and states.lost == {}
    states.take([EngineFailure("killed again", is_ready=False, life=states.life(0))], served=[])
    assert states.lost == {0: "killed again"}


def test_groups_are_generated_again_once_a_lost_engine_is_back(ranks, build):
    """No replica is left, so the ranks have one brought back before they ask again; the completions are
    the same.
    """
    generators, revived = build(), []
    whole = tokens(ranks.run(lambda rank: generators[rank].generate(request())))
    for rank, generator in enumerate(generators):
        dies_at(generator.engine, prompt_id=2 + rank, ready=False)

        def revive(rank=rank, generator=generator):
            revived.append(rank)
            generator.engine.before, generator.engine.ready = lambda prompt: None, True
            generator.replicas.recover(0)
            return True

        generator.revive = revive
    results = ranks.run(lambda rank: generators[rank].generate(request()))
    assert tokens(results) == whole and sorted(revived) == [0, 1]
    assert [generator.replicas.lost for generator in generators] == [{1: "the server is gone"}] * RANKS


def test_a_rollout_without_any_engine_ends_the_run_on_all_ranks(ranks, build):
    generators = build()
    for generator in generators:
        generator.replicas.lost.update({0: "killed by SIGKILL", 1: "no more restarts"})
    errors = ranks.run(lambda rank: generators[rank].generate(request()))
    assert {type(error) for error in errors} == {RolloutFailedError}
