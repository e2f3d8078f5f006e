"""The measuring tool runs, and its rows have what its table promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_checkpoint.py"


@pytest.mark.distributed
@pytest.mark.timeout(400)
def test_the_quick_table_has_all_rows(tmp_path):
    command = [
        sys.executable,
        TOOL,
        "--quick",
        "--repeats",
        "1",
        "--layouts",
        "pp2",
        "--folder",
        tmp_path,
        "--json",
        tmp_path / "rows.json",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["operation"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == [
        f"save {kind}, {when}" for kind in ("sync", "async", "export") for when in ("first", "later")
    ] + ["load"]
    for name, row in rows.items():
        expected = (
            {"load_seconds", "verify_seconds"}
            if name == "load"
            else {"stall_seconds", "complete_seconds", "slowdown", "bytes"}
        )
        assert {"peak_extra_bytes", "own_shard_bytes", *expected} <= row.keys() and all(
            row[field] > 0 for field in expected
        )
    assert not list(tmp_path.glob("bench_checkpoint_*"))
