"""Whole runs with rollout engines that are servers, shared by both ranks."""

import json

import psutil
import pytest

from megagrpo.engines import ENGINES

pytestmark = [pytest.mark.engines, pytest.mark.end_to_end, pytest.mark.timeout(900)]

NAMES = [name for name in ENGINES.names() if not ENGINES.get(name).is_embedded]
STEPS = 15
FULL_BATCH = ["rollout.prompts_per_step=32", "rollout.completions_per_prompt=8"]  # the quickstart's own


def writers_of(file):
    """Ids of the processes that have `file` open."""
    opened = {
        process.pid: process.info["open_files"] or () for process in psutil.process_iter(["open_files"])
    }
    return [pid for pid, files in opened.items() if str(file) in [opened_file.path for opened_file in files]]


@pytest.fixture(scope="module", params=NAMES)
def run_folder(request, run_all):
    """The server sleeps in every update, without its weights: each publish brings all of them."""
    overrides = [f"engine.name={request.param}", f"run.steps={STEPS}", "evaluation.every=0", *FULL_BATCH]
    overrides += ["engine.sleep_while_training=true", "update.offload=[gradients,optimizer]"]
    return run_all(2, {request.param: overrides})[request.param]


def test_the_engine_agrees_with_the_actor_in_every_step(run_folder, rows_of):
    """Both ranks' completions come from one server; 2e-5 is what float32 rounding leaves between two ways
    to compute the same.
    """
    rows = rows_of(run_folder)[1:]
    assert len(rows) == STEPS
    assert all(row["rollout/max_logprob_gap"] <= 2e-5 for row in rows)
    assert [row["rollout/weight_version"] for row in rows] == list(range(STEPS))


def test_the_run_learns(run_folder):
    """From about 0.28; the embedded engine's runs are over 0.8 after so many steps."""
    sampled = json.loads((run_folder / "summary.json").read_text())["eval"]["sampled"]
    assert sampled["last"] > sampled["first"] + 0.3, sampled


def test_one_server_was_started_and_none_is_left(run_folder):
    (log,) = (run_folder / "engines").glob("*.log")  # the server's standard output
    assert not writers_of(log)


AHEAD = [
    "run.steps=5",
    "evaluation.every=0",
    "rollout.off_policy=one_step_off",
    "algorithm.correction.importance=token",
]


@pytest.fixture(scope="module")
def ahead(run_all):
    """One step off: two SGLang servers that are given what changed, and the embedded engine, with the same
    draws.
    """
    servers = [
        "engine.name=sglang",
        "engine.server.replicas=2",
        "weights.delta=true",
        "engine.max_batch_completions=64",
    ]
    return run_all(2, {"servers": [*AHEAD, *servers], "embedded": AHEAD})


def test_two_sglang_servers_one_step_ahead_sample_what_the_embedded_engine_samples(ahead, rows_of):
    """The same tokens give the same rewards and lengths, step by step; log-probs agree within what float32
    rounding leaves.
    """
    servers, embedded = rows_of(ahead["servers"])[1:], rows_of(ahead["embedded"])[1:]
    assert [row["rollout/weight_version"] for row in servers] == [0, 0, 1, 2, 3]
    assert [row["rollout/policy_age_max"] for row in servers] == [0, 1, 1, 1, 1]
    for name in ("reward/mean", "rollout/generated_tokens", "rollout/completion_tokens"):
        assert [row[name] for row in servers] == [row[name] for row in embedded], name
    for row, other in zip(servers, embedded, strict=True):
        assert row["policy/rollout_logprob"] == pytest.approx(other["policy/rollout_logprob"], abs=2e-5)
        assert row["policy/correction_weight_max"] == pytest.approx(
            other["policy/correction_weight_max"], rel=1e-3
        )
    assert servers[0]["rollout/max_logprob_gap"] <= 2e-5
    assert all(row["publish/probe_gap"] <= 2e-5 and row["rollout/lost_replicas"] == 0 for row in servers)


def test_two_servers_were_given_what_changed_and_none_is_left(ahead, rows_of):
    """The first publish in slices is whole, and so the base of those after it. An update leaves no block of
    this model as it was, but the rows that pad the vocabulary, which are not sent again."""
    kept = [row["publish/kept_ratio"] for row in rows_of(ahead["servers"])[1:]]
    assert kept[0] == 1.0 and all(0.9 < ratio < 1.0 for ratio in kept[1:]), kept
    logs = sorted((ahead["servers"] / "engines").glob("*.log"))
    assert [log.name for log in logs] == ["sglang_0.log", "sglang_1.log"] and not any(map(writers_of, logs))
