"""Reward `code`: runs the program that a completion wrote against unit tests of its prompt, in a sandbox."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megagrpo.errors import UserError
from megagrpo.rewards.code_tests import CodeTest, is_same_output, is_same_result, read_tests
from megagrpo.rewards.places import find_tagged, strip_reasoning
from megagrpo.rewards.reward import REWARDS, check_choice, read_column
from megagrpo.rewards.sandbox.run_program import Limits, SandboxUnavailableError, check_sandbox, run_program
from megagrpo.types import Completion, Prompt

EXTRACTS = ("fenced", "text")
SCORES = ("all", "fraction")
_FENCE = re.compile(r" {0,3}```+ *([\w+-]*) *$")
_LANGUAGES = ("", "python", "python3", "py")


@REWARDS.register("code")
class CodeReward:
    """Score the last fenced block of Python by the tests of a column.

    Args:
        column: the tests: `[{input, output}]` (text on standard input and output), `[{call, args, kwargs,
            want}]` (a function of the program and its result, values of JSON), `{inputs, outputs, fn_name}`
            (as APPS and TACO), or any of them as JSON text.
        extract: the program is the last `fenced` block of Python, or the whole `text`.
        prefix: what the prompt already began the program with, e.g. the head of a function.
        score: `all`: 1.0 where all tests pass, else 0.0; `fraction`: the share that passes.
        seconds: time limit of each test, and of all calls together.
        memory_mib: limit of the program's address space.
        parallel: tests of standard input that run at a time.
        reasoning: what stands between these tags is no answer.

    Raises:
        UserError: a value is not allowed, or the machine has no Landlock or seccomp to confine programs.
    """

    def __init__(
        self,
        column: str = "tests",
        extract: str = "fenced",
        prefix: str = "",
        score: str = "all",
        seconds: float = 5.0,
        memory_mib: int = 512,
        parallel: int = 2,
        reasoning: str = "think",
    ):
        check_choice("code", "extract", extract, EXTRACTS)
        check_choice("code", "score", score, SCORES)
        for name, value in (("seconds", seconds), ("memory_mib", memory_mib), ("parallel", parallel)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise UserError(f"rewards.functions: 'code': {name} is {value!r}; more than 0 is needed")
        self.column, self.extract, self.prefix = column, extract, prefix
        self.score, self.parallel, self.reasoning = score, int(parallel), reasoning
        self.limits = Limits(
            wall_seconds=seconds, cpu_seconds=int(seconds) + 1, memory_bytes=int(memory_mib) << 20
        )

    def warm_up(self) -> None:
        """Raise UserError where programs can't be confined."""
        try:
            check_sandbox()
        except SandboxUnavailableError as error:
            raise UserError(f"rewards.functions: 'code': programs can't be confined here: {error}") from None

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """Return 1.0, 0.0, or the share of tests that pass.

        Raises:
            UserError: the prompt has no such column.
            ValueError: the column holds no tests.
        """
        tests = read_tests(read_column(prompt, self.column, "code"))
        program: str | None = strip_reasoning(completion.text, self.reasoning)
        if self.extract == "fenced":
            program = find_program(program or "")
        if program is None:
            return 0.0
        passed = sum(self._run(self.prefix + program, tests))
        return passed / len(tests) if self.score == "fraction" else float(passed == len(tests))

    def _run(self, program: str, tests: Sequence[CodeTest]) -> list[bool]:
        """Return which tests pass: those of standard input each in a process, all calls in one."""
        texts = [test for test in tests if test.call is None]
        calls = [(test.call, test.want) for test in tests if test.call is not None]
        passed: list[bool] = []
        if texts:
            with ThreadPoolExecutor(min(self.parallel, len(texts))) as threads:
                passed += threads.map(lambda test: self._prints(program, test), texts)
        if calls:
            outcome = run_program(program, self.limits, calls=[call for call, _ in calls])
            passed += [
                is_same_result(result, want) for result, (_, want) in zip(outcome.results, calls, strict=True)
            ]
        return passed

    def _prints(self, program: str, test: CodeTest) -> bool:
        outcome = run_program(program, self.limits, test.stdin)
        return outcome.kind == "ok" and is_same_output(outcome.output, test.want)


def find_program(text: str) -> str | None:
    """Return the last closed fenced block of Python, inside `<answer>` where that tag is there."""
    tagged = find_tagged(text, "answer")
    found: str | None = None
    block: list[str] | None = None
    is_python = False
    for line in (text if tagged is None else tagged).split("\n"):
        fence = _FENCE.match(line)
        if fence is None:
            if block is not None:
                block.append(line)
        elif block is None:
            block, is_python = [], fence[1].lower() in _LANGUAGES
        else:
            found = "\n".join(block) if is_python else found
            block = None
    return found
