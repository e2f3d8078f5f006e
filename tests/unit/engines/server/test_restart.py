"""What an engine knows of its server after that was started anew, or was left in the midst of an update."""

import pytest

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines import ENGINES
from megagrpo.engines.base import EngineError
from megagrpo.engines.server import engine_server
from megagrpo.engines.server.http_client import EngineClient, EngineUnreachable
from megagrpo.wire.bucket_manifest import BucketManifest, TensorEntry


@pytest.fixture
def open_engine(tiny_hf_folder, monkeypatch):
    """A function: is_owner -> an engine whose server, given by its address, is only said to be there."""
    monkeypatch.setattr(EngineClient, "is_answering", lambda self, path: True)
    config = build_engine_config(
        name="vllm", server={"addresses": ("http://127.0.0.1:9",), "max_restarts": 2}
    )
    engines = []

    def open_engine(is_owner):
        engines.append(ENGINES.get("vllm")(tiny_hf_folder("qwen3"), config, is_owner=is_owner))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.fixture
def follower(open_engine):
    """One that holds version 4."""
    engine = open_engine(is_owner=False)
    publish(engine, 4)
    return engine


def publish(engine, version):
    engine.begin_update(version)
    entries = tuple(
        TensorEntry(name, "float32", tuple(shape), 0, 0, "0")
        for name, shape in engine.protocol.model.tensor_shapes.items()
    )
    engine.receive(BucketManifest(version, "none", {}, "full", entries))
    engine.commit_update(version)


def test_a_follower_takes_note_of_a_start_at_another_address(follower):
    follower.restart("http://127.0.0.1:10")
    assert (follower.address, follower.health().state) == ("http://127.0.0.1:10", "empty")
    publish(follower, 4)  # the version that was lost
    assert follower.weight_version == 4


def test_a_server_that_is_taken_for_empty_is_given_any_version_whole(follower):
    """A publish that another replica ended: this one may hold the old version, half of the new one, or all
    of it.
    """
    with pytest.raises(EngineError, match="version 4 is not above version 4"):
        follower.begin_update(4)
    follower.begin_update(5)
    follower.forget_weights()
    assert follower.health().state == "empty"
    publish(follower, 4)
    assert follower.health().ready


def test_asking_for_checksums_notices_that_the_server_is_gone(follower, monkeypatch):
    def gone(self, *arguments, **options):
        raise EngineUnreachable("no answer")

    monkeypatch.setattr(EngineClient, "call", gone)
    with pytest.raises(EngineUnreachable):
        follower.parameter_checksums()
    assert (follower.health().state, follower.health().detail) == ("dead", "no answer")


def test_a_given_server_is_taken_back_where_it_answers_as_often_as_allowed(open_engine, monkeypatch):
    engine = open_engine(is_owner=True)
    for _ in range(2):
        engine.server._loss = "http://127.0.0.1:9/collective_rpc: RemoteProtocolError"
        assert engine.health().state == "dead"
        engine.restart()
        assert engine.health().state == "empty"  # it is given everything
    with pytest.raises(EngineError, match=r"engine\.server\.max_restarts = 2 are used up"):
        engine.restart()


def test_a_given_server_that_does_not_answer_again_stays_lost(open_engine, monkeypatch):
    engine = open_engine(is_owner=True)
    monkeypatch.setattr(EngineClient, "is_answering", lambda self, path: False)
    monkeypatch.setattr(engine_server, "_RETURN_SECONDS", 0.0)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9 was not started here, .* does not answer"):
        engine.restart()
    assert engine.health().state == "dead"
