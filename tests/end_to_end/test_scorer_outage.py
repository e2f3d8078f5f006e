"""Scores that fail are told by a run: counted, explained, and the end of it where nothing is scored."""

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
from small_runs import QUICKSTART, SMALL

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300)]


@pytest.fixture
def run_with(tmp_path):
    """A function: body of a reward -> (exit code, output) of one rank's two steps in `tmp_path`/run."""

    def run(body: str, *overrides: str) -> tuple[int, str]:
        (tmp_path / "user.py").write_text(f"def reward(prompts, completions):\n{body}\n")
        command = [sys.executable, "-m", "megagrpo.train", QUICKSTART, *SMALL, "parallel.tp=1", "run.steps=2"]
        command += [f"run.dir={tmp_path / 'run'}", f"rewards.functions.0.name={tmp_path / 'user.py'}:reward"]
        command += overrides
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_run_whose_judge_is_away_ends_with_one_line_and_its_first_cause(run_with):
    code, output = run_with("    raise ConnectionError('no judge at port 9')")
    assert code == 2
    lines = [line for line in output.splitlines() if "scorer outage" in line]
    assert lines and all("unreachable: reward: ConnectionError: no judge at port 9" in line for line in lines)
    assert "Traceback" not in output


def test_some_failed_scores_are_counted_and_explained_and_training_goes_on(run_with, tmp_path):
    code, output = run_with(
        "    if prompts[0].id % 4 == 0:\n        raise TimeoutError('the judge is slow')\n"
        "    return [float(number % 2) for number in range(len(completions))]"
    )
    assert code == 0, output
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row.get("reward/failed_fraction")]
    assert trained and all(0 < row["reward/failed_fraction/timeout"] < 1 for row in trained)
    failed = [value for row in rows for name, value in row.items() if name.endswith("/failed_fraction")]
    evaluated = [
        value
        for row in rows
        for name, value in row.items()
        if name.startswith("eval/") and name.endswith("/failed_fraction")
    ]
    assert evaluated and all(0 < value < 1 for value in evaluated) and len(failed) > len(evaluated)
    assert "could not be scored (timeout" in output and "the judge is slow" in output
    samples = [
        json.loads(line)
        for path in (tmp_path / "run/completions").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    told = {row["detail"] for row in samples if row["outcome"] == "timeout"}
    assert told == {"reward: the judge is slow"}


def test_a_judge_behind_http_is_asked_where_one_word_allows_it(run_with, tmp_path):
    """Without it the run ends before the first step and names the word, though the reward takes the refused
    connection for a score.
    """
    asked = []

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"0.5" if len(asked) % 2 else b"1.0")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        body = (
            "    from urllib.request import urlopen\n"
            "    try:\n"
            f"        return [float(urlopen('http://{address}/').read()) for _ in completions]\n"
            "    except OSError:\n"
            "        return [0.0] * len(completions)"
        )
        code, output = run_with(body)
        assert (code, asked) == (2, []), output
        told = f"tried to reach {address}, and rewards.network is false; rewards.network: true gives"
        assert told in output and "Traceback" not in output
        code, output = run_with(body, "rewards.network=true", "evaluation.every=0", "run.steps=1")
        assert code == 0 and len(asked) >= 32, output
        server.shutdown()
    (row,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()][1:]
    assert 0.5 < row["reward/mean"] < 1.0
