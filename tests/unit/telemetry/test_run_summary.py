"""A run's summary: all of its steps, held-out sets and publishes in a few numbers."""

import json

from megagrpo.telemetry import names
from megagrpo.telemetry.summary import build_summary, save_summary

ROWS = [
    {"step": 0, "eval/held_out": 0.3, "eval/held_out/tokens": 99.0},
    {
        "step": 1,
        names.STEP_SECONDS: 2.0,
        names.STEP_CPU_SECONDS: 3.0,
        names.GENERATED_TOKENS: 100.0,
        names.LOGPROB_GAP: 1e-6,
    },
    {
        "step": 2,
        names.STEP_SECONDS: 4.0,
        names.STEP_CPU_SECONDS: 5.0,
        names.GENERATED_TOKENS: 50.0,
        names.LOGPROB_GAP: 3e-6,
        "eval/held_out": 0.9,
    },
    {"step": 3, names.STEP_SECONDS: 3.0, names.STEP_CPU_SECONDS: 4.0, "eval/held_out": 0.8},
]


def test_the_summary_counts_training_steps_and_follows_each_held_out_set(tmp_path):
    summary = build_summary(ROWS, wall_seconds=30.0, peak_rss_bytes=[10, 20])
    versions = summary.pop("versions")
    assert {"python", "megagrpo", "torch", "megatron-core"} <= set(versions)
    assert summary == {
        "steps": 3,
        "wall_seconds": 30.0,
        "step_seconds": 3.0,
        "cpu_seconds_per_step": 4.0,
        "peak_rss_bytes": [10, 20],
        "eval": {"held_out": {"first": 0.3, "last": 0.8, "best": 0.9}},
        "max_logprob_gap": 3e-6,
        "generated_tokens": 150,
        "publish": {"publishes": 0, "seconds": {}, "bytes": {}},
    }
    assert json.loads(save_summary(tmp_path, summary).read_text()) == summary


def test_the_summary_has_the_memory_of_devices_where_there_are_some():
    on_cpu = build_summary(ROWS, wall_seconds=1.0, peak_rss_bytes=[1, 2], peak_device_bytes=[0, 0])
    on_gpu = build_summary(ROWS, wall_seconds=1.0, peak_rss_bytes=[1, 2], peak_device_bytes=[7, 5])
    assert "peak_device_bytes" not in on_cpu
    assert on_gpu["peak_device_bytes"] == [7, 5]


def test_a_run_without_steps_has_a_summary_too(tmp_path):
    summary = build_summary([], wall_seconds=1.0, peak_rss_bytes=[1], versions={})
    assert (
        summary["steps"],
        summary["cpu_seconds_per_step"],
        summary["max_logprob_gap"],
        summary["eval"],
    ) == (0, None, None, {})


def test_the_publishes_of_a_run_are_summed_up():
    numbers = [(0.5, 100, 30, 1.0, 1e-6), (0.7, 60, 40, 0.1, 3e-6), (0.9, 50, 20, 0.2, 2e-6)]
    rows = [
        {
            "step": step,
            names.PUBLISH_SECONDS: seconds,
            "publish/write_seconds": seconds / 2,
            "publish/written_bytes": written,
            "publish/peak_bytes": peak,
            "publish/written_share": share,
            "publish/kept_ratio": 1.0,
            "publish/probe_gap": gap,
            "publish/buckets": 3,
        }
        for step, (seconds, written, peak, share, gap) in enumerate(numbers, start=1)
    ]
    summary = build_summary([{"step": 0}, *rows], wall_seconds=1.0, peak_rss_bytes=[1], versions={})
    assert summary["publish"] == {
        "publishes": 3,
        "seconds": {"all": 0.7, "write": 0.35},
        "bytes": {"written": 210, "peak": 40},
        "written_share": 0.2,
        "kept_ratio": 1.0,
        "probe_gap": 3e-6,
    }


def test_a_gap_that_was_not_finite_is_not_summed_up_as_a_small_one():
    rows = [{"step": 1, names.LOGPROB_GAP: 1e-6}, {"step": 2, names.LOGPROB_GAP: None}]
    assert build_summary(rows, wall_seconds=1.0, peak_rss_bytes=[1], versions={})["max_logprob_gap"] is None
