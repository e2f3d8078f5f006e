"""The control code of a step runs for rank 0 of a world of any size, and enters few collectives."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[3] / "tools/bench_scale.py"


def test_a_small_world_is_measured(tmp_path):
    """One gather of metadata is two collectives: lengths, then bytes. Their number does not grow with the
    world.
    """
    command = [sys.executable, str(TOOL), "--ranks", "16", "64", "--prompts", "32", "--completions", "4"]
    subprocess.run([*command, "--json", str(tmp_path / "rows.json")], check=True, timeout=200)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["ranks"] for row in rows] == [16, 64]
    for row in rows:
        assert row["gathers"] == 2
        assert {"deal_cpu_seconds", "gather_cpu_seconds", "plan_cpu_seconds"} <= row.keys()
