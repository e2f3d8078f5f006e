"""The measuring tool of the output layer writes the rows that reports read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_logprobs.py"
FIELDS = {
    "implementation",
    "T",
    "V",
    "H",
    "tp",
    "peak_extra_bytes",
    "forward_cpu_seconds",
    "forward_backward_cpu_seconds",
}


@pytest.mark.distributed
def test_every_row_names_its_cell_and_its_measurements(tmp_path):
    rows_file = tmp_path / "rows.json"
    sizes = ["--tokens", "8", "--vocabulary", "64", "--hidden", "8", "--tp", "2", "--repeats", "1"]
    command = [
        sys.executable,
        str(TOOL),
        *sizes,
        "--implementations",
        "ours_token",
        "dense",
        "--json",
        str(rows_file),
    ]
    output = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True).stdout
    rows = json.loads(rows_file.read_text())
    assert [row["implementation"] for row in rows] == ["gemm", "ours_token", "dense"]
    assert all(row.keys() >= FIELDS and row["tp"] == 2 for row in rows)
    assert rows[1]["forward_backward_cpu_seconds"] > 0 and rows[1]["peak_extra_bytes"] >= 0
    # The dense way has no tensor-parallel form: its row is there and says nothing.
    assert rows[2]["forward_cpu_seconds"] is None and "one rank only" in output
