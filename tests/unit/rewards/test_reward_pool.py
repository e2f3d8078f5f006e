"""The pool's promises: order, weights, and that nothing a scorer does to its process reaches the run."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megagrpo.config.rollout_sections import RewardConfig
from megagrpo.errors import UserError
from megagrpo.rewards.messages import Request

COUNT_CHARACTERS = "return [float(len(completion.text)) for completion in completions]"
# hangs or dies on the text that names it, and otherwise scores by length
MISBEHAVE = """
for completion in completions:
    if completion.text == "hang":
        while True:
            pass
    if completion.text == "exit":
        os._exit(3)
    if completion.text == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
return [float(len(completion.text)) for completion in completions]
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def test_rewards_come_in_the_order_of_the_completions_over_several_workers(
    open_pool, write_reward, make_group
):
    pool = open_pool(write_reward("time.sleep(0.002 * (7 - prompts[0].id))\n" + COUNT_CHARACTERS), workers=3)
    groups = [make_group("x" * number, "x" * (number + 20), prompt_id=number) for number in range(7)]
    prompts = [prompt for group in groups for prompt in group[0]]
    completions = [completion for group in groups for completion in group[1]]
    assert [reward.value for reward in pool.score(prompts, completions)] == [
        float(len(completion.text)) for completion in completions
    ]


def test_any_number_of_requests_is_taken_while_the_server_thread_is_busy(open_pool, write_reward, make_group):
    """A wake-up for each request fills its socket at about 280, and whoever sends then holds the lock that
    the serving thread needs.
    """
    pool = open_pool(write_reward("time.sleep(0.5)\n" + COUNT_CHARACTERS))
    busy, go_on = threading.Event(), threading.Event()
    prompts, completions = make_group("four")
    request = Request(0, prompts, completions)
    first = pool._dispatcher.submit(request)
    first.add_done_callback(lambda _: (busy.set(), go_on.wait(30)))
    assert busy.wait(30)
    asking = threading.Thread(
        target=lambda: [pool._dispatcher.submit(request) for _ in range(2000)], daemon=True
    )
    asking.start()
    asking.join(20)
    was_taken = not asking.is_alive()
    go_on.set()
    assert was_taken


def test_value_is_the_weighted_sum_and_parts_are_named(open_pool, write_reward, make_group):
    length = RewardConfig(name=write_reward(COUNT_CHARACTERS), weight=0.5)
    pool = open_pool(
        length,
        RewardConfig(name="exact_match", weight=2.0),
        RewardConfig(name="exact_match", options={"column": "other"}),
    )
    rewards = pool.score(*make_group("abcd", "zz", answer="abcd", other="zz"))
    assert [reward.parts for reward in rewards] == [
        {"reward": 4.0, "exact_match": 1.0, "exact_match_2": 0.0},
        {"reward": 2.0, "exact_match": 0.0, "exact_match_2": 1.0},
    ]
    assert [reward.value for reward in rewards] == [0.5 * 4 + 2.0, 0.5 * 2 + 1.0]
    assert pool.part_names == ("reward", "exact_match", "exact_match_2")


def test_options_reach_a_users_function_as_keyword_arguments(open_pool, tmp_path, make_group):
    (tmp_path / "scaled.py").write_text(
        "def score(prompts, completions, scale):\n    return [scale] * len(completions)\n"
    )
    pool = open_pool(RewardConfig(name=f"{tmp_path / 'scaled.py'}:score", options={"scale": 3.0}))
    assert pool.score(*make_group("a"))[0].value == 3.0


def test_no_completion_gives_no_reward(open_pool):
    assert open_pool("format").score([], []) == []


def test_a_prompt_is_needed_for_each_completion(open_pool, make_group):
    prompts, completions = make_group("a", "b")
    with pytest.raises(ValueError, match="1 prompts for 2 completions"):
        open_pool("format").score(prompts[:1], completions)


@pytest.mark.parametrize(
    ("text", "outcome", "detail"),
    [
        ("hang", "timeout", "took over 0.5 s"),
        ("exit", "crash", "exit status 3"),
        ("segfault", "crash", "signal 11"),
    ],
)
def test_only_the_completion_at_fault_fails_and_the_pool_goes_on(
    open_pool, write_reward, make_group, text, outcome, detail
):
    pool = open_pool(write_reward(MISBEHAVE), timeout_seconds=0.5)
    rewards = pool.score(*make_group("ab", text, "abc"))
    assert [reward.value for reward in rewards] == [2.0, -5.0, 3.0]
    assert [reward.outcome for reward in rewards] == ["ok", outcome, "ok"]
    assert rewards[1].parts == {"reward": -5.0}
    assert rewards[1].detail.startswith("reward: ") and detail in rewards[1].detail
    assert pool.replaced_workers == 2  # once for the call with all three, once for the one at fault
    assert pool.score(*make_group("abcd"))[0].value == 4.0


def test_a_completion_that_fails_in_one_reward_keeps_its_other_parts(open_pool, write_reward, make_group):
    pool = open_pool("exact_match", write_reward(MISBEHAVE))
    (reward,) = pool.score(*make_group("exit", answer="exit"))
    assert reward.value == -5.0
    assert reward.parts == {"exact_match": 1.0, "reward": -5.0}
    assert reward.outcome == "crash"


def test_a_worker_that_hangs_is_gone_with_the_processes_it_started(
    open_pool, write_reward, make_group, tmp_path
):
    body = f"""
child = subprocess.Popen(["sleep", "600"])
open({str(tmp_path / "pids")!r}, "a").write(f"{{os.getpid()}} {{child.pid}} ")
while True:
    pass
"""
    pool = open_pool(write_reward(body), timeout_seconds=1.0)
    assert pool.score(*make_group("a"))[0].outcome == "timeout"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert all(wait_until_gone(pid) for pid in pids)


def test_a_worker_that_dies_while_idle_is_replaced_and_costs_no_completion(
    open_pool, write_reward, make_group
):
    pool = open_pool(write_reward("return [os.getpid()] * len(completions)"))
    first = int(pool.score(*make_group("a"))[0].value)
    os.kill(first, signal.SIGKILL)
    assert wait_until_gone(first)
    (reward,) = pool.score(*make_group("a"))
    assert reward.outcome == "ok"
    assert int(reward.value) != first
    assert pool.replaced_workers == 1


def test_printing_and_reading_input_do_not_disturb_the_pool(open_pool, write_reward, make_group):
    body = (
        'print("x" * 100_000, flush=True)\nos.write(1, b"y" * 1000)\nassert sys.stdin.read() == ""\n'
        + COUNT_CHARACTERS
    )
    assert open_pool(write_reward(body)).score(*make_group("abc"))[0].value == 3.0


def test_a_group_is_scored_while_another_one_hangs(open_pool, write_reward, make_group):
    pool = open_pool(write_reward(MISBEHAVE), workers=2, timeout_seconds=30.0)
    hanging = pool.submit(*make_group("hang", prompt_id=0))
    groups = [pool.submit(*make_group("a" * number, prompt_id=number)) for number in range(1, 6)]
    assert [group.result(timeout=20.0)[0].value for group in groups] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert not hanging.done()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        hanging.result(timeout=20.0)


def test_several_threads_may_score_at_once(open_pool, write_reward, make_group):
    pool = open_pool(write_reward("time.sleep(0.001 * (prompts[0].id % 3))\n" + COUNT_CHARACTERS), workers=3)
    with ThreadPoolExecutor(8) as threads:
        scores = list(
            threads.map(lambda number: pool.score(*make_group("x" * number, prompt_id=number)), range(40))
        )
    assert [score[0].value for score in scores] == [float(number) for number in range(40)]


def test_close_ends_every_worker(open_pool, write_reward, make_group):
    pool = open_pool(write_reward("time.sleep(0.2)\nreturn [os.getpid()]"), workers=2)
    groups = [make_group("a", prompt_id=number) for number in range(2)]
    rewards = pool.score([group[0][0] for group in groups], [group[1][0] for group in groups])
    pids = {int(reward.value) for reward in rewards}
    assert len(pids) == 2
    pool.close()
    pool.close()
    assert not any(is_running(pid) for pid in pids)  # reaped too: a zombie would still have its id
    with pytest.raises(ValueError, match="closed"):
        pool.score(*make_group("a"))


def test_a_busy_worker_dies_with_a_parent_that_is_killed(write_reward, tmp_path):
    pid_file = tmp_path / "pid"
    name = write_reward(f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\nwhile True:\n    pass")
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
        worker = int(pid_file.read_text())
    finally:
        parent.kill()
        parent.wait()
    assert wait_until_gone(worker)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = 1\nreturn [1 / 0]", r"raised ZeroDivisionError: .*user_reward\.py, line 6: return \[1 / 0\]"),
        ("sys.exit('stop')", "raised SystemExit: stop"),
        ("return [1.0, float('nan')]", "completion 1: returned nan; a finite number is needed"),
        ("return [float('inf'), 1.0]", "completion 0: returned inf;"),
        ("return [1.0]", "returned 1 values for 2 completions"),
        ("return None", r"returned None \(NoneType\); a list with one entry per completion is needed"),
        ("return ['1', '0']", r"completion 0: returned '1' \(str\); a number, None .* is needed"),
    ],
)
def test_a_mistake_in_a_users_function_ends_with_one_line_that_names_function_and_prompt(
    open_pool, write_reward, make_group, body, message
):
    name = write_reward(body)
    with pytest.raises(UserError, match=message) as caught:
        open_pool(name).score(*make_group("a", "b", prompt_id=17))
    assert str(caught.value).startswith(f"reward {name!r}, prompt 17")
    assert "\n" not in str(caught.value)


def test_a_missing_column_ends_with_the_columns_there_are(open_pool, make_group):
    with pytest.raises(UserError, match="prompt 0 has no column 'answer'; its columns: gold"):
        open_pool("exact_match").score(*make_group("a", gold="a"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardConfig(name="mathh"), "no reward is called 'mathh'; did you mean math"),
        (
            RewardConfig(name="format", options={"tag": ["a"]}),
            "options of 'format': .*'tag'; options: tags, pattern, prefix",
        ),
        (RewardConfig(name="format", options={"pattern": "("}), "is not a regular expression"),
        (RewardConfig(name="format", options={"tags": []}), "a list of words is needed"),
        (
            RewardConfig(name="exact_match", options={"compare": "line"}),
            "compare is 'line'; allowed: text, first_line, last_line",
        ),
        (RewardConfig(name="math", options={"extract": "box"}), "extract is 'box'; allowed: auto, boxed"),
        (RewardConfig(name="missing_file.py:reward"), "missing_file.py"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_line_before_anything_is_scored(open_pool, config, message):
    with pytest.raises(UserError, match=message):
        open_pool(config)
