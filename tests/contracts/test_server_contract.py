"""What an engine must do that is a server: buckets and their acknowledgements, followers, requests on their
way, death.

The servers are real ones; `make test-engines` runs this.
"""

import threading
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from bucket_files import bucket_file, load
from engine_contract import (
    SERVER_MARKS,
    TOLERANCE,
    assert_logprobs_match,
    params,
    publish,
    server_names,
    servers,
    teacher_forced,
    tokens,
    weights,
)

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines import ENGINES
from megagrpo.engines.base import EngineError
from megagrpo.wire.bucket_manifest import TensorEntry


@servers
def test_every_rank_acknowledges_a_bucket_with_version_checksums_and_bytes(build_engine, model):
    engine = build_engine()
    engine.begin_update(1)
    bucket = weights(model)[:3]
    with bucket_file(1, bucket) as manifest:
        (ack,) = engine.receive(manifest)
    assert ack == {
        "rank": 0,
        "version": 1,
        "tensors": {entry.name: entry.checksum for entry in manifest.tensors},
        "bytes": sum(tensor.nbytes for _, tensor in bucket),
    }


@servers
def test_a_checksum_that_differs_is_named_and_its_bucket_never_serves(
    build_engine, prompts, model, other_model
):
    engine = build_engine()
    publish(engine, model, version=1)
    engine.begin_update(2)
    with bucket_file(2, weights(other_model)[:3]) as manifest:
        first, *rest = manifest.tensors
        broken = replace(manifest, tensors=(replace(first, checksum="00000000"), *rest))
        with pytest.raises(
            EngineError,
            match=rf"{first.name}.*checksum {first.checksum}, the sender's is "
            r"00000000",
        ):
            engine.receive(broken)
    engine.abort_update()
    with pytest.raises(EngineError, match="stale"):
        engine.generate(prompts, params(), range(2))
    publish(engine, other_model, version=3)
    assert_logprobs_match(other_model, prompts, engine.generate(prompts, params(), range(2)))


@servers
def test_a_client_that_stops_in_the_middle_of_an_update_leaves_nothing_that_serves(
    build_engine, prompts, model, other_model
):
    first = build_engine()
    publish(first, model, version=1)
    first.begin_update(2)
    load(first, weights(other_model)[:5])
    first.close()  # neither committed nor aborted
    second = build_engine()
    with pytest.raises(EngineError, match="no weights were committed"):
        second.generate(prompts, params(), range(2))
    publish(second, other_model, version=1)
    assert_logprobs_match(other_model, prompts, second.generate(prompts, params(), range(2)))


@servers
def test_a_follower_generates_what_its_owner_published(build_engine, prompts, model, other_model):
    owner = build_engine()
    follower = build_engine(is_owner=False)
    for version, published in ((1, model), (2, other_model)):
        publish(owner, published, version)
        publish(follower, published, version)
        assert follower.weight_version == version
        groups = follower.generate(prompts, params(), range(2))
        assert_logprobs_match(published, prompts, groups)
        assert tokens(groups) == tokens(owner.generate(prompts, params(), range(2)))


@pytest.fixture
def requests_on_their_way(prompts, model):
    """A function (engine, version) -> (thread, list that gets each prompt with its group): a generate() under
    `version`, of `model`, of which one group is whole and as many as are sent at once wait for their place.
    """

    def start(engine, version=1):
        publish(engine, model, version)
        result = []
        first_group = threading.Event()

        def ask():
            asked = prompts * 16
            groups = engine.generate(
                asked, params(max_new_tokens=100), range(16), on_group=lambda *group: first_group.set()
            )
            result.extend(zip(asked, groups, strict=True))

        thread = threading.Thread(target=ask)
        thread.start()
        assert first_group.wait(120)
        return thread, result

    return start


@servers
def test_a_request_on_its_way_goes_on_under_the_new_weights_and_says_from_which_token_on(
    build_engine, prompts, model, other_model, requests_on_their_way
):
    """Each token's log-prob is that of the version it carries, given all tokens before it: nothing of the
    old keys and values is left.
    """
    engine, crossing = build_engine(), []
    for version in range(1, 20, 2):  # a busy server may have told of no group before all that it holds ended
        thread, result = requests_on_their_way(engine, version)
        publish(engine, other_model, version + 1)
        thread.join()
        expected = {version: model, version + 1: other_model}
        for prompt, group in result:
            for completion in group:
                versions = tuple(version for _, version in completion.weight_versions)
                assert versions in ((version,), (version, version + 1), (version + 1,))
            crossing += [(prompt, each) for each in group if len(each.weight_versions) > 1]
        if crossing:
            break
    for prompt, completion in [*crossing[:64], *((prompt, group[0]) for prompt, group in result)]:
        starts = [start for start, _ in completion.weight_versions] + [len(completion.token_ids)]
        for (start, version), end in zip(completion.weight_versions, starts[1:], strict=True):
            right, _ = teacher_forced(expected[version], prompt, completion)
            np.testing.assert_allclose(
                completion.logprobs[start:end], right[start:end].numpy(), atol=TOLERANCE, rtol=0
            )
    assert crossing


def complete(engine, model, version):
    """All of an update but that its version serves."""
    engine.begin_update(version)
    load(engine, weights(model))
    engine.complete_update(version)


@servers
def test_a_version_that_is_not_verified_answers_the_probe_alone(
    build_engine, prompts, model, other_model, requests_on_their_way
):
    engine = build_engine()
    thread, result = requests_on_their_way(engine)
    complete(engine, other_model, version=2)
    for _ in range(2):
        probe = engine.sample_probe(prompts[0], params(max_new_tokens=8))
        assert probe.weight_versions == ((0, 2),)
        assert_logprobs_match(other_model, prompts[:1], [[probe]])
    assert engine.weight_version is None
    assert (engine.health().state, engine.health().ready) == ("verifying", False)
    for refused in (
        lambda: engine.generate(prompts, params(), range(2)),
        lambda: engine.begin_update(3),
        lambda: load(engine, []),
    ):
        with pytest.raises(
            EngineError, match="the rollout engine is verifying: the new weights are not verified yet"
        ):
            refused()
    thread.join(2.0)
    assert thread.is_alive()  # what is on its way takes less than a second once it may go on
    with pytest.raises(EngineError, match="version 3: it is version 2"):
        engine.serve_update(3)
    engine.serve_update(2)
    thread.join()
    assert engine.weight_version == 2
    versions = {
        tuple(version for _, version in completion.weight_versions)
        for _, group in result
        for completion in group
    }
    assert (1,) in versions and versions <= {(1,), (1, 2), (2,)} and len(versions) > 1
    with pytest.raises(EngineError, match="the rollout engine is serving"):
        engine.sample_probe(prompts[0], params())


@servers
def test_a_version_that_fails_its_probe_never_serves_and_the_next_one_heals(
    build_engine, prompts, model, other_model, requests_on_their_way
):
    engine = build_engine()
    thread, result = requests_on_their_way(engine)
    complete(engine, other_model, version=2)
    engine.sample_probe(prompts[0], params(max_new_tokens=8))
    engine.abort_update()  # what the publisher does where engine and trainer disagree
    thread.join(120)
    assert not thread.is_alive()  # what waited for its place was not sent to the paused server
    served = {
        version for _, group in result for completion in group for _, version in completion.weight_versions
    }
    assert served == {1}
    assert "abort" in {completion.finish_reason for _, group in result for completion in group}
    assert engine.weight_version is None and engine.health().state == "stale"
    with pytest.raises(EngineError, match="stale"):
        engine.generate(prompts, params(), range(2))
    publish(engine, model, version=2)
    assert engine.weight_version == 2
    assert_logprobs_match(model, prompts, engine.generate(prompts, params(), range(2)))


def changes_of(manifest, unchanged, base):
    """A bucket that says of further tensors that they are what they were."""
    left_out = (
        TensorEntry(name, "float32", tuple(tensor.shape), 0, 0, "00000000", None, ())
        for name, tensor in unchanged
    )
    return replace(manifest, tensors=(*manifest.tensors, *left_out), base=base)


@servers
def test_tensors_that_did_not_change_are_left_out_of_an_update(build_engine, prompts, model, other_model):
    engine = build_engine()
    publish(engine, model, version=1)
    name, tensor = weights(other_model)[2]
    unchanged = [(other, value) for other, value in weights(model) if other != name]
    dict(model.named_parameters())[name].data.copy_(tensor)
    # the second time the engine holds another version than the one that the changes are to
    for version in (2, 3):
        engine.begin_update(version)
        with bucket_file(version, [(name, tensor)]) as manifest:
            if version == 3:
                with pytest.raises(
                    EngineError, match="changes to version 1 came, this engine rank holds version 2"
                ):
                    engine.receive(changes_of(manifest, unchanged, base=1))
                engine.abort_update()
                continue
            engine.receive(changes_of(manifest, unchanged, base=1))
        engine.commit_update(version)
        assert_logprobs_match(model, prompts, engine.generate(prompts, params(), range(2)))
    publish(engine, other_model, version=3)
    assert_logprobs_match(other_model, prompts, engine.generate(prompts, params(), range(2)))


def fused_parameters(model, shapes):
    """The parameters of a tensor parallel 1 engine, fused from a model's; the vocabulary's padding is
    zeros.
    """
    tensors = dict(weights(model))
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name, shape in shapes.items():
        fused = next((fused for fused in parts if fused in name), None)
        tensor = (
            torch.cat([tensors[name.replace(fused, part)] for part in parts[fused]])
            if fused
            else tensors[name]
        )
        yield (
            name,
            torch.nn.functional.pad(tensor, (0, 0, 0, shape[0] - len(tensor)))
            if tensor.ndim == 2
            else tensor,
        )


@pytest.mark.parametrize("build_engine", [pytest.param("vllm", marks=SERVER_MARKS)], indirect=True)
def test_slices_written_into_fused_parameters_equal_the_engines_own_loading_bit_for_bit(
    build_engine, prompts, model, other_model
):
    engine = build_engine()
    publish(engine, other_model, version=1)
    (loaded,) = engine.parameter_checksums()
    publish(engine, model, version=2)
    assert engine.parameter_checksums() != [loaded]
    (described,) = engine.describe_parameters()
    shapes = {name: parameter["shape"] for name, parameter in described.items()}
    engine.begin_update(3)
    with bucket_file(3, list(fused_parameters(other_model, shapes))) as manifest:
        engine.receive(replace(manifest, layout="sharded"))
    engine.commit_update(3)
    assert engine.parameter_checksums() == [loaded]
    assert_logprobs_match(other_model, prompts, engine.generate(prompts, params(), range(2)))


@server_names
def test_a_server_whose_workers_die_is_told_started_anew_and_generates_the_same(
    name, tiny_hf_folder, prompts, model
):
    folder = tiny_hf_folder("qwen3", tie_word_embeddings=True)
    config = build_engine_config(name=name, server={"max_restarts": 1, "request_timeout_seconds": 90})
    engine = ENGINES.get(name)(folder, config)
    try:
        publish(engine, model, version=4)
        whole = tokens(engine.generate(prompts, params(max_new_tokens=100), range(64)))
        failure = []

        def generate():
            try:
                while True:  # however fast the machine is, a request is on its way when the workers die
                    engine.generate(prompts, params(max_new_tokens=100), range(64))
            except EngineError as error:
                failure.append(str(error))

        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        time.sleep(0.5)
        for child in psutil.Process(engine.pid).children(recursive=True):
            child.kill()
        thread.join(150)
        assert failure and not engine.health().ready and engine.health().state == "dead", (
            failure,
            engine.health(),
        )
        assert engine.weight_version is None
        with pytest.raises(EngineError, match="the rollout engine is dead: "):
            engine.generate(prompts, params(), range(2))
        engine.restart()
        assert engine.health().state == "empty"
        publish(engine, model, version=4)  # the version that was lost
        assert tokens(engine.generate(prompts, params(max_new_tokens=100), range(64))) == whole
        psutil.Process(engine.pid).kill()
        with pytest.raises(EngineError, match="killed by SIGKILL"):
            publish(engine, model, version=5)
        with pytest.raises(EngineError, match=r"engine.server.max_restarts = 1 are used up"):
            engine.restart()
    finally:
        engine.close()


# SGLang's: test_sglang_engine.py
@pytest.mark.parametrize("name", [pytest.param("vllm", marks=SERVER_MARKS)])
def test_trainer_ranks_publish_straight_to_the_servers_ranks(
    name, server_address, tiny_hf_folder, publish_through_a_group
):
    publish_through_a_group(name, server_address(name), tiny_hf_folder("qwen3", tie_word_embeddings=True))
