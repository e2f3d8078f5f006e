"""What of a server's memory is there when: between sleep and the next version it wakes in two parts.

The servers below keep the books of vLLM's executor (`sleeping_tags`, v1/executor/abstract.py) and of SGLang's
scheduler (`offload_tags`, scheduler_components/weight_updater.py), which takes no tag twice.
"""

import base64
import json
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from bucket_files import load

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines.base import EngineError
from megagrpo.engines.server.engine import ServerEngine
from megagrpo.engines.server.sglang_protocol import SglangProtocol
from megagrpo.engines.server.vllm_protocol import VllmProtocol
from megagrpo.wire.bucket_manifest import BucketManifest, build_ack
from megagrpo.wire.sglang_instructions import read_instruction

WEIGHTS = [("a", torch.randn(2, 3))]


class Server:
    """Memory of two tags, and what is asked in order."""

    url, loss = "http://127.0.0.1:1", None

    def __init__(self):
        self.asleep, self.asked, self.is_paused, self.is_kept = set(), [], False, True

    def close(self) -> None: ...

    def restart(self) -> None:
        self.asleep = set()

    def load(self, manifest_json: str) -> dict:
        assert "weights" not in self.asleep, "weights are written where no memory is"
        self.asked.append(f"load, asleep: {sorted(self.asleep)}")
        return build_ack(BucketManifest.from_json(manifest_json), 0)

    def commit(self) -> None:
        assert not self.asleep and self.is_paused
        self.asked.append("commit")


class Vllm(Server):
    def call(self, path, body=None, is_repeatable=False):
        route, query = urlsplit(path).path, parse_qs(urlsplit(path).query)
        if route == "/sleep":
            assert not self.asleep
            self.asleep, self.is_paused = {"weights", "kv_cache"}, True
            self.is_kept = query["level"] == ["1"]
        elif route == "/wake_up":
            tags = set(query.get("tags", self.asleep))
            assert tags <= self.asleep
            self.asleep -= tags
            self.is_paused = bool(self.asleep)  # core.py: fully awake is scheduling again
            self.asked.append(f"wake {sorted(tags)}")
            return {"status": "sleeping" if self.asleep else "awake", "tags": sorted(tags)}
        elif route == "/pause":
            self.is_paused = True
        elif route == "/resume":
            self.is_paused = False
        elif route == "/collective_rpc" and body["method"] == "receive_bucket":
            return {"results": [self.load(*body["args"])]}
        elif route == "/collective_rpc" and body["method"] == "commit_weights":
            self.commit()
            return {"results": [{"rank": 0, "version": int(body["args"][0])}]}
        return {"status": "sleeping", "success": True}


class Sglang(Server):
    def call(self, path, body=None, is_repeatable=False):
        tags = set((body or {}).get("tags", ["weights", "kv_cache", "cuda_graph"]))
        if path == "/release_memory_occupation":
            assert not self.asleep
            self.asleep = tags
        elif path == "/resume_memory_occupation":
            assert tags <= self.asleep
            self.asleep -= tags
            self.asked.append(f"wake {sorted(tags - {'cuda_graph'})}")
        elif path == "/pause_generation":
            self.is_paused = True
        elif path == "/continue_generation":
            self.is_paused = False
        elif path == "/update_weights_from_tensor":
            instruction = read_instruction(base64.b64decode(body["serialized_named_tensors"][0]))
            if "commit" in instruction:
                self.commit()
            answers = [self.load(instruction["load"])] if "load" in instruction else []
            return {"message": json.dumps(answers)}
        return {"message": "ok"}


KINDS = {"vllm": (Vllm, VllmProtocol), "sglang": (Sglang, SglangProtocol)}


def build(name, **fields):
    kind, protocol = KINDS[name]
    model = SimpleNamespace(
        config=build_engine_config(name, server=fields),
        device=torch.device("cuda"),
        dtype=torch.float32,
        load_weights=False,
        tensor_shapes={tensor: value.shape for tensor, value in WEIGHTS},
    )
    server = kind()
    engine = ServerEngine(protocol(model, server), server)
    publish(engine, 1)
    server.asked.clear()
    return engine, server


def publish(engine, version):
    engine.begin_update(version)
    load(engine, WEIGHTS)
    engine.commit_update(version)


def sleep_and_wake(engine, server):
    engine.sleep()
    assert {"weights", "kv_cache"} <= server.asleep
    engine.wake()


@pytest.mark.parametrize("name", KINDS)
def test_the_cache_wakes_when_the_new_weights_are_there_and_before_they_are_committed(name):
    engine, server = build(name)
    sleep_and_wake(engine, server)
    publish(engine, 2)
    assert [line.split(",")[0] for line in server.asked] == [
        "wake ['weights']",
        "load",
        "wake ['kv_cache']",
        "commit",
    ]
    assert "kv_cache" in server.asked[1] and not server.asleep and not server.is_paused
    sleep_and_wake(engine, server)  # and so on, every step
    publish(engine, 3)


@pytest.mark.parametrize("name", KINDS)
def test_weights_that_were_dropped_are_no_base_for_changes(name):
    """A publisher sends changes where engines say that they hold the version before."""
    engine, server = build(name)
    sleep_and_wake(engine, server)
    assert engine.weight_version is None
    with pytest.raises(EngineError, match="is empty"):
        engine.generate([], None, [])
    with pytest.raises(EngineError, match="version 1 is not above version 1"):
        engine.begin_update(1)


@pytest.mark.parametrize("name", KINDS)
def test_kept_weights_wake_with_the_cache_and_hold_their_version(name):
    engine, server = build(name, sleep_keeps_weights=True)
    sleep_and_wake(engine, server)
    assert not server.asleep and engine.weight_version == 1
    publish(engine, 2)
    assert [line.split(",")[0] for line in server.asked[1:]] == ["load", "commit"]


@pytest.mark.parametrize("name", KINDS)
def test_a_server_whose_update_failed_sleeps_again_whole(name):
    engine, server = build(name)
    sleep_and_wake(engine, server)
    engine.begin_update(2)
    engine.abort_update()
    sleep_and_wake(engine, server)
    publish(engine, 3)
    assert not server.asleep


@pytest.mark.parametrize("name", KINDS)
def test_a_server_that_was_restarted_has_all_of_its_memory(name):
    engine, server = build(name)
    sleep_and_wake(engine, server)
    engine.restart()
    publish(engine, 1)
    assert "wake ['kv_cache']" not in server.asked


def test_vllm_is_told_how_deep_to_sleep():
    for keeps, is_kept in ((False, False), (True, True)):
        engine, server = build("vllm", sleep_keeps_weights=keeps)
        engine.sleep()
        assert server.is_kept is is_kept
