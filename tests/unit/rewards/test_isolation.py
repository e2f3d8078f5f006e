"""What reward code can't do to the run: it runs in a process that limits it, and its answers are data."""

import ctypes
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from datetime import date

import pytest

from megagrpo.config.rollout_sections import RewardConfig
from megagrpo.errors import UserError
from megagrpo.rewards import frames

SCORE = "return [float(len(completion)) for completion in completions]"


class Payload:
    """A pickle that, loaded, makes the file `path`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def frame(body: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", len(body) if length is None else length) + body


def scores(*values) -> bytes:
    return frame(
        json.dumps({"kind": "scores", "scores": [{"value": v, "parts": {}} for v in values]}).encode()
    )


def is_running(pid: int) -> bool:
    """Return whether the process lives; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(*pids: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (b"PICKLE", "Invalid JSON"),
        (frame(b"[" * 100_000), "JSON"),
        (frame(b'{"kind": "scores", "scores": [{"value": NaN, "parts": {}}]}'), "scores"),
        (frame(b'{"kind": "scores", "scores": [{"value": "1", "parts": {}}]}'), "valid number"),
        (frame(b'{"kind": "scores", "scores": [], "module": "os"}'), "module: Unexpected keyword"),
        (frame(b'{"kind": "ready"}'), "no answer to what was asked"),
        (frame(b'{"kind": "run"}'), "kind"),
        (scores(1.0, 1.0, 1.0), "3 scores for 1 completions"),
        (scores(9.0) + scores(9.0), "more than one reply"),
        (frame(b"", length=2**31), "2147483648 bytes are announced"),
    ],
    ids=range(10),
)
def test_a_forged_reply_runs_nothing_and_costs_its_own_completion_alone(
    open_pool, write_reward, make_group, tmp_path, forged, reason
):
    trap = tmp_path / "trap"
    if forged == b"PICKLE":
        forged = frame(pickle.dumps(Payload(trap)))
    body = f"""
if completions[0] == "forge":
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, {forged!r})
        except OSError:
            pass
    time.sleep(30)
{SCORE}
"""
    pool = open_pool(write_reward(body))
    (reward,) = pool.score(*make_group("forge"))
    assert reward.outcome == "crash" and reason in reward.detail
    assert not trap.exists()
    assert pool.score(*make_group("abc"))[0].value == 3.0


def test_a_reply_that_nobody_asked_for_replaces_its_worker(open_pool, write_reward, make_group):
    body = f"""
import threading
def forge():
    time.sleep(0.3)
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, {scores(1000.0)!r})
        except OSError:
            pass
if completions[0] == "later":
    threading.Thread(target=forge).start()
{SCORE}
"""
    pool = open_pool(write_reward(body))
    assert pool.score(*make_group("later"))[0].value == 5.0
    deadline = time.monotonic() + 20
    while not pool.replaced_workers and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pool.replaced_workers == 1
    assert pool.score(*make_group("abc"))[0].value == 3.0


def test_the_environment_holds_what_is_allowed_and_what_is_named(
    open_pool, write_reward, make_group, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("JUDGE_KEY", "named")
    name = write_reward(
        "return [sum(os.environ.get(key) == value for key, value in "
        '[("HF_TOKEN", "secret"), ("MASTER_ADDR", "10.0.0.1")]) + 10 * ("JUDGE_KEY" in os.environ)]'
    )
    assert open_pool(name).score(*make_group("a"))[0].value == 0.0
    assert open_pool(name, environment=("JUDGE_KEY",)).score(*make_group("a"))[0].value == 10.0


def test_no_descriptor_of_the_trainer_is_open_in_a_worker(open_pool, write_reward, make_group, tmp_path):
    body = f"""
targets = []
for descriptor in os.listdir("/proc/self/fd"):
    try:
        targets.append(os.readlink(f"/proc/self/fd/{{descriptor}}"))
    except OSError:
        pass
return [sum({str(tmp_path / "weights")!r} in target for target in targets)]
"""
    with open(tmp_path / "weights", "w") as file:
        os.set_inheritable(file.fileno(), True)
        assert open_pool(write_reward(body)).score(*make_group("a"))[0].value == 0.0


def test_a_completion_that_takes_too_much_memory_fails_alone(open_pool, write_reward, make_group):
    body = f'if "big" in completions:\n    bytearray(3 << 30)\n{SCORE}'
    rewards = open_pool(write_reward(body), memory_gib=2.0).score(*make_group("ab", "big"))
    assert [reward.outcome for reward in rewards] == ["ok", "memory"]
    assert rewards[1].detail == "reward: needs more than 2 GiB (rewards.memory_gib)"


FORK_AWAY = """
pid_file = {pid_file!r}
code = "import os, time; os.setsid(); open({pid_file!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(600)"
if os.fork() == 0:  # a daemon: two forks, and a session of its own
    child = subprocess.Popen([sys.executable, "-c", code])
    os._exit(0)
while not (os.path.exists(pid_file) and open(pid_file).read()):
    time.sleep(0.01)
{then}
"""


@pytest.mark.parametrize("end", ["close", "time-out", "exit"])
def test_daemons_that_a_reward_forked_end_with_its_worker(open_pool, write_reward, make_group, tmp_path, end):
    then = {"close": SCORE, "time-out": "time.sleep(600)", "exit": "os._exit(3)"}[end]
    pid_file, seconds = tmp_path / "pids", 5.0 if end == "time-out" else 60.0
    pool = open_pool(
        write_reward(FORK_AWAY.format(pid_file=str(pid_file), then=then)), timeout_seconds=seconds
    )
    (reward,) = pool.score(*make_group("a"))
    assert reward.outcome == {"close": "ok", "time-out": "timeout", "exit": "crash"}[end]
    if end == "close":
        pool.close()
    (pid,) = map(int, pid_file.read_text().split())
    assert wait_until_gone(pid)


def test_daemons_end_with_a_trainer_that_is_killed(write_reward, tmp_path):
    pid_file = tmp_path / "pids"
    name = write_reward(FORK_AWAY.format(pid_file=str(pid_file), then="while True:\n    pass"))
    script = tmp_path / "parent.py"
    script.write_text(f"""
import numpy as np
from megagrpo.config.rollout_sections import RewardsConfig
from megagrpo.rewards.pool import RewardPool
from megagrpo.types import Completion, Prompt

pool = RewardPool(RewardsConfig(functions=[{{"name": {name!r}}}], timeout_seconds=600.0))
pool.score([Prompt(0, "", ())], [Completion.sampled(0, 0, np.zeros(1), np.zeros(1), "stop", ((0, 0),), "")])
""")
    parent = subprocess.Popen([sys.executable, script])
    try:
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        (daemon,) = map(int, pid_file.read_text().split())
    finally:
        parent.kill()
        parent.wait()
    assert wait_until_gone(daemon)


def test_a_request_larger_than_the_sockets_buffer_to_a_frozen_worker_times_out(
    open_pool, write_reward, make_group
):
    pool = open_pool(write_reward("return [os.getpid()] * len(completions)"), timeout_seconds=1.0)
    worker = int(pool.score(*make_group("a"))[0].value)
    os.kill(worker, signal.SIGSTOP)
    started = time.monotonic()
    (reward,) = pool.score(*make_group("x" * 30_000_000))
    assert reward.outcome == "timeout"
    assert time.monotonic() - started < 30.0
    assert wait_until_gone(worker)


def test_a_large_request_arrives_whole(open_pool, write_reward, make_group):
    pool = open_pool(write_reward(SCORE), timeout_seconds=60.0)
    rewards = pool.score(*make_group("x" * 5_000_000, "y", notes=["z" * 1_000_000, {"deep": [1, None]}]))
    assert [reward.value for reward in rewards] == [5_000_000.0, 1.0]


def has_landlock_domains() -> bool:
    version = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    return version >= 2


@pytest.mark.skipif(not has_landlock_domains(), reason="the kernel has no Landlock of Linux 5.19")
@pytest.mark.parametrize("file", ["environ", "mem", "maps", "fd/0", "cwd"])
def test_reward_code_looks_into_no_process_of_the_run(open_pool, write_reward, make_group, file):
    body = f"""
path = "/proc/{os.getpid()}/{file}"
try:
    os.readlink(path) if os.path.islink(path) else open(path, "rb").read(1)
except PermissionError:
    return [1.0]
return [0.0]
"""
    assert open_pool(write_reward(body)).score(*make_group("a"))[0].value == 1.0


def test_a_reward_that_scores_nothing_stops_the_run_long_before_all_its_time_outs(
    open_pool, write_reward, make_group
):
    pool = open_pool(write_reward("time.sleep(60)"), timeout_seconds=0.2, outage_seconds=1.5)
    groups = [make_group(*"abcd", prompt_id=number) for number in range(16)]
    with pytest.raises(UserError, match=r"scorer outage: .*first failure: timeout: took over 0\.2 s"):
        pool.score(
            [prompt for prompts, _ in groups for prompt in prompts],
            [completion for _, completions in groups for completion in completions],
        )
    assert pool.replaced_workers <= 16  # all of them would be 16 + 64 time-outs


def test_one_prompt_that_nothing_scores_is_no_outage(open_pool, write_reward, make_group):
    body = f"if prompts[0].id == 0:\n    time.sleep(60)\n{SCORE}"
    pool = open_pool(write_reward(body), timeout_seconds=0.2, outage_seconds=0.3)
    assert {reward.outcome for reward in pool.score(*make_group(*"abcd"))} == {"timeout"}
    assert pool.score(*make_group("ab", prompt_id=1))[0].value == 2.0


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (date(2024, 3, 9), "a datetime.date can't be handed to a reward; allowed: null"),
        ({"a": [b"x"]}, "a builtins.bytes can't be handed"),
        ({1: "x"}, "a mapping with 1 as a key; keys must be text"),
    ],
)
def test_a_column_that_json_has_no_type_for_is_named(open_pool, make_group, value, problem):
    with pytest.raises(UserError, match=problem) as caught:
        open_pool("format").score(*make_group("a", when=value))
    assert str(caught.value).startswith("rewards: prompt 0, column 'when': ")


def test_a_request_that_is_too_long_is_told_with_its_prompt(open_pool, make_group, monkeypatch):
    pool = open_pool("format")
    monkeypatch.setattr(frames, "MAX_REQUEST_BYTES", 2000)
    assert pool.score(*make_group("a"))[0].outcome == "ok"
    with pytest.raises(
        UserError, match=r"prompt 4: its columns and 1 completions are \d+ bytes; 2000 can be"
    ):
        pool.score(*make_group("a", prompt_id=4, notes="x" * 2000))


def test_an_option_that_json_has_no_type_for_is_named(open_pool):
    with pytest.raises(UserError, match=r"options of 'exact_match': column: a datetime.date"):
        open_pool(RewardConfig(name="exact_match", options={"column": date(2024, 3, 9)}))
