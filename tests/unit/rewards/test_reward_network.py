"""Reward code reaches the network only where the configuration says so."""

import socket

import pytest

from megagrpo.config.rollout_sections import RewardConfig
from megagrpo.errors import UserError

REACH = """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_INET6, ("::1", {port}))):
    try:
        with socket.socket(family) as client:
            client.connect(address)
    except OSError:
        continue
    return [1.0]
return [0.0]
"""


def test_reward_code_reaches_the_network_only_where_the_configuration_says_so(
    open_pool, write_reward, make_group
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        name = write_reward(REACH.format(port=server.getsockname()[1]))
        assert open_pool(name, network=True).score(*make_group("a"))[0].value == 1.0
        with pytest.raises(UserError, match=r"py:reward', prompt 7: tried to reach the network by a socket"):
            open_pool(name).score(*make_group("a", prompt_id=7))


def test_programs_that_a_reward_starts_reach_no_network_either(open_pool, write_reward, make_group):
    """No audit hook is in these: the kernel refuses."""
    code = """
import itertools, socket, sys
opened = 0
for family, kind in itertools.product([socket.AF_INET, socket.AF_INET6, socket.AF_PACKET, 16, 40], [1, 2, 3]):
    try:
        socket.socket(family, kind).close()
        opened += 1
    except OSError:
        pass
sys.exit(min(opened, 1))
"""
    name = write_reward(f"return [subprocess.run([sys.executable, '-c', {code!r}]).returncode]")
    assert open_pool(name).score(*make_group("a"))[0].value == 0.0
    assert open_pool(name, network=True).score(*make_group("a"))[0].value == 1.0


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ("urllib.request.urlopen('http://judge.example:8000/score')", "judge.example:8000"),
        ("urllib.request.urlopen('http://127.0.0.1:9/score')", "127.0.0.1:9"),
        ("asyncio.run(asyncio.open_connection('127.0.0.1', 9))", "the network by a socket"),
        ("threading.Thread(target=socket.create_connection, args=[('judge', 80)]).run()", "judge:80"),
    ],
)
@pytest.mark.parametrize("swallows", [False, True])
def test_a_judge_that_is_out_of_reach_is_named_with_the_word_that_lets_it_in(
    open_pool, write_reward, make_group, body, place, swallows
):
    """Also where the reward takes every error for a score of 0."""
    body = f"import asyncio, socket, threading, urllib.request\n{body}\nreturn [1.0]"
    if swallows:
        lines = body.replace("\n", "\n    ")
        body = f"try:\n    {lines}\nexcept Exception:\n    return [0.0]"
    told = (
        f"tried to reach {place}, and rewards.network is false; rewards.network: true gives reward code the"
    )
    with pytest.raises(UserError, match=told):
        open_pool(write_reward(body)).score(*make_group("a"))


def test_a_reward_that_reaches_for_the_network_while_it_loads_is_refused(open_pool, tmp_path):
    (tmp_path / "loads.py").write_text(
        "import socket\ntry:\n    socket.create_connection(('models.example', 443))\n"
        "except OSError:\n    pass\n"
        "\n\ndef reward(prompts, completions):\n    return [0.0] * len(completions)\n"
    )
    with pytest.raises(
        UserError, match=r"loads.py:reward': tried to reach models.example:443, and rewards.net"
    ):
        open_pool(f"{tmp_path / 'loads.py'}:reward")


def test_what_is_no_network_works_without_it(open_pool, write_reward, make_group, tmp_path):
    """Pools of processes, event loops, sockets of files, moves between folders; a library that tries at its
    import whether there is IPv6 (urllib3 does) has reached for nothing.
    """
    (tmp_path / "probing.py").write_text(
        "import socket\n\n\ndef _has_ipv6(host):\n    try:\n"
        "        socket.socket(socket.AF_INET6).bind((host, 0))\n"
        "    except Exception:\n        return False\n    return True\n\n\nHAS_IPV6 = _has_ipv6('::1')\n"
    )
    body = f"""
import asyncio, multiprocessing, socket
sys.path.append({str(tmp_path)!r})
import probing
assert probing.HAS_IPV6 is False
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.map(abs, [-1]) == [1]
assert asyncio.run(asyncio.sleep(0, 1)) == 1
with socket.socket(socket.AF_UNIX) as server:
    server.bind({str(tmp_path / "own.sock")!r})
child = subprocess.Popen(["sleep", "60"])
child.kill()
assert child.wait() == -signal.SIGKILL
for folder in "ab":
    os.makedirs(os.path.join({str(tmp_path)!r}, folder))
open(os.path.join({str(tmp_path)!r}, "a", "file"), "w").close()
os.rename(os.path.join({str(tmp_path)!r}, "a", "file"), os.path.join({str(tmp_path)!r}, "b", "file"))
return [1.0]
"""
    assert open_pool(write_reward(body)).score(*make_group("a"))[0].value == 1.0


def test_built_in_rewards_need_no_network(open_pool, make_group):
    pool = open_pool("math", "format", RewardConfig(name="code", options={"extract": "text"}))
    tests = [{"input": "", "output": "42"}]
    (reward,) = pool.score(*make_group("print(42)", answer="42", tests=tests))
    assert (reward.outcome, reward.parts["code"]) == ("ok", 1.0)


def test_a_machine_that_cannot_take_the_network_away_says_so(open_pool, monkeypatch, tmp_path):
    """As one without seccomp: the worker's own filter is replaced by one that the kernel refuses."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'megagrpo.rewards.keeper' in ' '.join(sys.orig_argv):\n"
        "    import megagrpo.rewards.sandbox.system_calls as calls\n    calls._ARCHITECTURES.clear()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = (
        r"rewards.network: false: .* can't be taken .* on this machine \(.*no table.*\); rewards.network: t"
    )
    with pytest.raises(UserError, match=told):
        open_pool("format")
    assert open_pool("format", network=True)
