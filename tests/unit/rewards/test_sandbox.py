"""What a confined program can and can't do. Attacks as such are cases of `code` (`cases/code.jsonl`)."""

import os
import re
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

from megagrpo.errors import UserError
from megagrpo.rewards import code
from megagrpo.rewards.code_tests import is_same_output, is_same_result, read_tests
from megagrpo.rewards.sandbox.run_program import (
    NO_RESULT,
    FunctionCall,
    Limits,
    SandboxUnavailableError,
    run_program,
)
from megagrpo.rewards.sandbox.system_calls import NUMBERS, build_filter

LIMITS = Limits(wall_seconds=20.0, cpu_seconds=20)
HEADERS = {
    0: [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")],
    1: [Path("/usr/include/asm-generic/unistd.h")],
}


def test_a_program_reads_its_input_and_what_it_prints_comes_back():
    outcome = run_program("print(int(input()) + 1)", LIMITS, stdin="41\n")
    assert (outcome.kind, outcome.output) == ("ok", "42\n")


def test_a_call_returns_its_result_through_json():
    program = "def pair(a, b=2):\n    return (a, 1 // b)"
    calls = [
        FunctionCall("pair", [1], {"b": 3}),
        FunctionCall("pair", [1, 0]),
        FunctionCall("pair", [2, 1]),
        FunctionCall("other"),
    ]
    outcome = run_program(program, LIMITS, calls=calls)
    assert (outcome.kind, outcome.results) == ("ok", [[1, 0], NO_RESULT, [2, 1], NO_RESULT])


def test_calls_that_are_not_reached_have_no_result():
    program = "import os\ndef f(a):\n    return a if a < 2 else os._exit(0)"
    assert run_program(program, LIMITS, calls=[FunctionCall("f", [a]) for a in (1, 2, 1)]).results == [
        1,
        NO_RESULT,
        NO_RESULT,
    ]


def test_the_whole_text_may_be_the_program_which_the_prompt_has_begun(make_group):
    reward = code.CodeReward(extract="text", prefix="def f(a):\n    return", score="fraction")
    tests = [{"call": "f", "args": [2], "want": 4}, {"call": "f", "args": [3], "want": 9}]
    for text, score in ((" a * a", 1.0), (" a + a", 0.5), (" a +", 0.0), ("", 0.0)):
        (prompt,), (completion,) = make_group(text, tests=tests)
        assert reward(prompt, completion) == score


def test_an_installed_package_can_be_imported():
    assert run_program("import yaml, decimal, sqlite3; print(yaml.safe_load('7'))", LIMITS).output == "7\n"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os; os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("import socket; socket.socket(socket.AF_UNIX)", "PermissionError"),
        ("import os; os.kill(os.getppid(), 0)", "PermissionError"),
        ("open('/etc/hostname')", "PermissionError"),
        ("open('/proc/self/status')", "PermissionError"),
        ("open('/tmp/left_behind', 'w')", "PermissionError"),
        ("import os; os.mkdir('folder')", "PermissionError"),
        ("import os; os.symlink('/dev/zero', 'link')", "PermissionError"),
        ("import os; os.chmod('spec.json', 0)", "PermissionError"),
        ("import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 40, 1 << 40))", "PermissionError|ValueError"),
        ("x = bytearray(4 << 30)", "MemoryError"),
        ("print('x' * (2 << 20))", "File too large"),
        ("import os; [os.open('/dev/null', 0) for _ in range(100)]", "Too many open files"),
    ],
)
def test_what_lies_outside_its_folder_is_refused(program, error):
    outcome = run_program(program, LIMITS)
    assert outcome.kind == "error"
    assert re.search(error, outcome.detail), outcome.detail


def test_the_environment_holds_nothing_of_ours(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    shown = run_program("import os; print(sorted(os.environ))", LIMITS).output
    assert "SECRET_TOKEN" not in shown and "RANK" not in shown and "TMPDIR" in shown


def test_a_program_that_sleeps_is_ended_and_its_folder_is_gone(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome = run_program("import time; time.sleep(60)", Limits(wall_seconds=1.0))
    assert outcome.kind == "timeout"
    assert list(tmp_path.iterdir()) == []


def test_the_program_ends_with_the_thread_that_started_it(tmp_path, monkeypatch):
    """A worker that is killed leaves no program behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pid = os.fork()
    if pid == 0:
        try:
            run_program("import time; time.sleep(60)", Limits(wall_seconds=60.0))
        finally:
            os._exit(0)

    def programs() -> list[str]:
        marked = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if str(tmp_path) in os.readlink(process / "cwd"):
                    marked.append(process.name)
            except OSError:
                continue
        return marked

    wait_for(lambda: bool(programs()))
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    wait_for(lambda: not programs())


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_programs_run_side_by_side_from_threads():
    outcomes = []
    threads = [
        threading.Thread(target=lambda n=n: outcomes.append(run_program(f"print({n})", LIMITS).output))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["0\n", "1\n", "2\n", "3\n"]


def test_a_machine_that_cannot_confine_refuses_the_reward(monkeypatch):
    def refuse():
        raise SandboxUnavailableError("the kernel has no Landlock, or it is switched off")

    monkeypatch.setattr(code, "check_sandbox", refuse)
    with pytest.raises(
        UserError, match="'code': programs can't be confined here: the kernel has no Landlock"
    ):
        code.CodeReward().warm_up()


@pytest.mark.parametrize("column", [0, 1], ids=["x86_64", "aarch64"])
def test_system_call_numbers_are_those_of_the_kernels_headers(column):
    header = next((path for path in HEADERS[column] if path.exists()), None)
    if header is None:
        pytest.skip("the kernel's headers are not installed")
    text = header.read_text()
    known = dict(re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", text, re.MULTILINE))
    wrong = {
        name: (numbers[column], known[name])
        for name, numbers in NUMBERS.items()
        if name in known and numbers[column] != int(known[name])
    }
    assert wrong == {}
    assert len([name for name in NUMBERS if name in known]) > 40


def run_filter(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Interpret a classic BPF program (the five instructions that it uses) on one call."""
    data = struct.pack("IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("HBBI", program))
    loaded, at = 0, 0
    while True:
        code_, if_true, if_false, value = instructions[at]
        if code_ == 0x06:
            return value
        if code_ == 0x20:
            (loaded,) = struct.unpack_from("I", data, value)
            at += 1
            continue
        holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code_]
        at += 1 + (if_true if holds else if_false)


@pytest.mark.parametrize(
    ("machine", "column", "audit"), [("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)]
)
def test_the_filter_refuses_what_it_lists_and_allows_the_rest(machine, column, audit):
    program, allow, refuse = build_filter(machine, 77), 0x7FFF0000, 0x00050001
    special = {"clone", "clone3", "kill", "tgkill", "prlimit64"}

    def ask(name: str, *arguments: int) -> int:
        return run_filter(program, audit, NUMBERS[name][column], *arguments)

    for name, numbers in NUMBERS.items():
        if numbers[column] is not None and name not in special:
            assert ask(name) == refuse, name
    assert ask("clone", 0x10000) == allow and ask("clone", 17) == refuse
    assert ask("clone3") == 0x00050000 | 38  # ENOSYS: libc falls back to clone
    assert ask("kill", 77, 9) == allow and ask("kill", 1, 9) == refuse and ask("tgkill", 78) == refuse
    assert ask("prlimit64", 0, 9, 0) == allow and ask("prlimit64", 0, 9, 4096) == refuse
    assert ask("prlimit64", 0, 9, 1 << 32) == refuse  # a pointer whose lower half is 0
    assert run_filter(program, audit, {"x86_64": 1, "aarch64": 64}[machine]) == allow  # write
    assert run_filter(program, 0x40000003, 1) == 0x80000000  # 32-bit calls have other numbers
    if machine == "x86_64":
        assert run_filter(program, audit, 0x40000000 + 57) == 0x80000000


def test_a_filter_of_sockets_allows_the_named_families_and_every_other_call():
    program = build_filter("x86_64", 77, ["socket", "ptrace"], [socket.AF_UNIX])
    answers = {
        family: run_filter(program, 0xC000003E, NUMBERS["socket"][0], family)
        for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_VSOCK)
    }
    assert {family for family, answer in answers.items() if answer == 0x7FFF0000} == {socket.AF_UNIX}
    assert run_filter(program, 0xC000003E, NUMBERS["ptrace"][0]) == 0x00050001
    assert run_filter(program, 0xC000003E, NUMBERS["fork"][0]) == 0x7FFF0000


@pytest.mark.parametrize(
    "tests",
    ["", "no", None, [], {}, 7, [{}], [{"input": 1}], {"inputs": [1], "outputs": []}, [{"call": "f"}]],
)
def test_a_column_without_tests_is_an_error_of_the_data(tests):
    with pytest.raises(ValueError, match="test"):
        read_tests(tests)


@pytest.mark.parametrize(
    ("output", "want", "same"),
    [
        ("3", "3\n", True),
        ("3 4", "3  4", True),
        ("3\n4", "3 4", False),
        ("3.0", "3", False),
        ("1e0", "1.0", True),
        ("0.3333333", "0.33333334", True),
        ("0.334", "0.3333", False),
        ("1_0.0", "10.0", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_by_words(output, want, same):
    assert is_same_output(output, want) is same


@pytest.mark.parametrize(
    ("result", "want", "same"),
    [
        (1, True, False),
        (1, 1.0, True),
        ([1, 2], [2, 1], False),
        ({"a": 1}, {"a": 1}, True),
        (None, 0, False),
        ("1", 1, False),
        (0.1 + 0.2, 0.3, True),
        (float("nan"), 1.0, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
    ],
)
def test_results_are_compared_kind_by_kind(result, want, same):
    assert is_same_result(result, want) is same
