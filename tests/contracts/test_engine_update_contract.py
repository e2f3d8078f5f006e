"""What every rollout engine must do with weights: an update is a transaction, and nothing stale or mixed
is ever served.
"""

import pytest
import torch
from bucket_files import load
from engine_contract import assert_logprobs_match, params, publish, tokens, weights

from megagrpo.engines.base import EngineError

NAME = "model.layers.1.mlp.up_proj.weight"


def test_a_commit_replaces_every_weight_and_drops_what_was_cached(build_engine, prompts, model, other_model):
    engine = build_engine()
    publish(engine, model, version=1)
    engine.generate(prompts, params(), range(2))
    publish(engine, other_model, version=2)
    assert engine.weight_version == 2
    groups = engine.generate(prompts, params(), range(2))
    assert_logprobs_match(other_model, prompts, groups)
    assert groups[0][0].weight_versions == ((0, 2),)


def assert_serves_only_the_old_version_or_nothing(engine, prompts, old_model, old_version):
    try:
        groups = engine.generate(prompts, params(), range(2))
    except EngineError:
        return
    assert groups[0][0].weight_versions == ((0, old_version),)
    assert_logprobs_match(old_model, prompts, groups)


def test_an_open_or_aborted_update_never_serves_a_mixture(build_engine, prompts, model, other_model):
    engine = build_engine()
    publish(engine, model, version=1)
    engine.begin_update(2)
    load(engine, weights(other_model)[:4])
    assert_serves_only_the_old_version_or_nothing(engine, prompts, model, 1)
    engine.abort_update()
    assert engine.weight_version in (1, None)
    assert engine.health().ready == (engine.weight_version == 1)
    assert_serves_only_the_old_version_or_nothing(engine, prompts, model, 1)
    publish(engine, other_model, version=2)  # the same version may be tried again
    assert_logprobs_match(other_model, prompts, engine.generate(prompts, params(), range(2)))


def test_an_update_aborted_before_any_tensor_keeps_the_old_version(build_engine, prompts, model):
    engine = build_engine()
    publish(engine, model, version=1)
    engine.begin_update(2)
    engine.abort_update()
    assert engine.weight_version == 1
    assert_logprobs_match(model, prompts, engine.generate(prompts, params(), range(2)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": tensors[NAME]}),
            "layers.9.mlp.up_proj.*no such",
        ),
        (lambda tensors: tensors.pop(NAME), rf"missing: {NAME}"),
        (
            lambda tensors: tensors.update({NAME: tensors[NAME].T}),
            rf"{NAME}.*shape \(32, 48\), the model's "
            r"is \(48, 32\)",
        ),
        (lambda tensors: tensors[NAME].view(-1)[5:6].fill_(torch.nan), rf"{NAME}.*not finite"),
        (lambda tensors: tensors[NAME].view(-1)[5:6].fill_(-torch.inf), rf"{NAME}.*not finite"),
    ],
)
def test_a_wrong_tensor_is_named_and_its_update_never_serves(
    build_engine, prompts, spoil, message, model, other_model
):
    engine = build_engine()
    publish(engine, model, version=1)
    tensors = {name: tensor.clone() for name, tensor in weights(other_model)}
    spoil(tensors)
    engine.begin_update(2)
    with pytest.raises(EngineError, match=message):
        load(engine, tensors.items())
        engine.commit_update(2)
    engine.abort_update()
    assert_serves_only_the_old_version_or_nothing(engine, prompts, model, 1)
    publish(engine, other_model, version=3)
    assert engine.health().ready and engine.weight_version == 3


def test_a_tensor_that_comes_twice_is_an_error(build_engine, model):
    engine = build_engine()
    engine.begin_update(1)
    load(engine, weights(model)[:2])
    with pytest.raises(EngineError, match="twice"):
        load(engine, weights(model)[1:])


def test_versions_only_grow_and_transactions_do_not_nest(build_engine, model):
    engine = build_engine()
    with pytest.raises(EngineError, match="no weight update is open"):
        load(engine, [])
    publish(engine, model, version=5)
    for version in (5, 4):
        with pytest.raises(EngineError, match=f"version {version} is not above version 5"):
            engine.begin_update(version)
    with pytest.raises(EngineError, match="no update"):
        engine.commit_update(6)
    engine.begin_update(6)
    with pytest.raises(EngineError, match="still open"):
        engine.begin_update(7)
    load(engine, weights(model))
    with pytest.raises(EngineError, match="one to 6"):
        engine.commit_update(7)
    engine.commit_update(6)
    assert engine.weight_version == 6


def test_an_engine_that_slept_generates_at_the_latest_after_the_next_version(
    build_engine, prompts, model, other_model
):
    """Its weights survive, or it says that it has none and takes all of the next version."""
    engine = build_engine()
    publish(engine, model, version=1)
    before = tokens(engine.generate(prompts, params(), range(2)))
    engine.sleep()
    assert not engine.health().ready
    with pytest.raises(EngineError, match="asleep"):
        engine.generate(prompts, params(), range(2))
    with pytest.raises(EngineError, match="asleep"):
        engine.begin_update(2)
    engine.wake()
    if engine.weight_version == 1:
        assert tokens(engine.generate(prompts, params(), range(2))) == before
    else:
        assert engine.weight_version is None
        with pytest.raises(EngineError, match="is empty"):
            engine.generate(prompts, params(), range(2))
    publish(engine, other_model, version=2)
    assert_logprobs_match(other_model, prompts, engine.generate(prompts, params(), range(2)))
