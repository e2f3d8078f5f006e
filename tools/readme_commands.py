"""Runs the commands that README.md and the READMEs of the examples show, with real values in the place of
names that stand for the reader's own, and small numbers in the place of large ones.

    python tools/readme_commands.py [--list] [--only TEXT]      # minutes

Lines of an engine are run where `make engines` has been. An example's first block is run by
`check_examples.py`, as it stands; `make test` and `make engines` by CI.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import environ, pathsep
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = "runs/readme"  # what the commands make
BY_CI = ("make test", "make engines")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PROGRAMS = ("make", "megagrpo", "python", "torchrun", "bash", "docker")
_OTHER_SERVER = "http://host1:8000"
# What is shown, and what stands in its place.
_VALUES = (
    *(("models/my-hf-folder", "models/smollm2-135m"), ("models/NAME", "models/smollm2-135m")),
    *(("mine.yaml", f"{FOLDER}/mine.yaml"), ("CONFIG.yaml", "examples/quickstart/quickstart.yaml")),
    ("train.jsonl data/", f"examples/gsm8k/sample.jsonl {FOLDER}/"),
    *(("test.jsonl data/", f"examples/gsm8k/sample_eval.jsonl {FOLDER}/"), ("=data/", f"={FOLDER}/")),
    *(("--gpus 8", "--gpus 0"), ("--nproc 8", "--nproc 2"), ("--nproc-per-node 8", "--nproc-per-node 2")),
    # for 8 GPUs and a larger model: a step of two groups, on a CPU
    *(("parallel.tp=2 parallel.pp=1", "parallel.tp=1 parallel.pp=2"), ("run.steps=200", "run.steps=1")),
    *(
        ("prompts_per_step=64", "prompts_per_step=2"),
        ("completions_per_prompt=8", "completions_per_prompt=2"),
    ),
    *(("max_new_tokens=1024", "max_new_tokens=16"), ("buffer_tokens=256", "buffer_tokens=4")),
    *(("max_new_tokens=20480", "max_new_tokens=16"), ("buffer_tokens=4096", "buffer_tokens=4")),
    ("mini_batches_per_step=16", "mini_batches_per_step=1"),
    ("parallel.tp=8 parallel.pp=1", "parallel.tp=1 parallel.pp=2"),
)
_SHORT = "run.steps=1 rollout.prompts_per_step=2 rollout.completions_per_prompt=2 evaluation.every=0"


@dataclass(frozen=True)
class Command:
    """A command that a README shows."""

    readme: str
    shown: str

    @property
    def engine(self) -> str | None:
        """The engine server that it needs."""
        found = re.search(r"engine\.name=(vllm|sglang)", self.shown)
        return found.group(1) if found else None

    @property
    def needs_server(self) -> bool:
        """Say whether it goes to a server that runs already."""
        return _OTHER_SERVER in self.shown

    def filled(self, number: int, address: str = _OTHER_SERVER) -> str:
        """Return what is run: with real values, as a short run in a folder of its own."""
        text = self.shown
        for name, value in (*_VALUES, (_OTHER_SERVER, address)):
            text = text.replace(name, value)
        if re.match(r"(megagrpo run|torchrun) ", text):
            text += f" run.dir={FOLDER}/run_{number} evaluation.sets.0.limit=2 {_SHORT}"
        return text


def shown_commands(readme: str) -> list[str]:
    """Return the commands of the shell blocks of a README, without their comments; blocks of output and of
    texts are left out.
    """
    commands = []
    for language, block in _BLOCK.findall(readme):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        if not language and lines[0].split(" ")[0] in _PROGRAMS:
            commands += [text for line in lines if (text := re.sub(r"\s+#.*", "", line).strip())]
    return commands


def commands_to_run() -> list[Command]:
    """Return what no other target runs, in the order shown."""
    found = [Command("README.md", text) for text in shown_commands((ROOT / "README.md").read_text("utf-8"))]
    for path in sorted((ROOT / "examples").glob("*/README.md")):
        text = path.read_text("utf-8")
        first = _BLOCK.search(text)
        rest = text[first.end() :] if first else text
        found += [Command(str(path.relative_to(ROOT)), shown) for shown in shown_commands(rest)]
    return [command for command in found if not command.shown.startswith(BY_CI)]


@contextmanager
def other_server(name: str) -> Iterator[str]:
    """Start an engine server as another machine's would run, and give its address."""
    from megagrpo.config.engine_sections import build_engine_config
    from megagrpo.engines import ENGINES

    engine = ENGINES.get(name)(ROOT / "examples/quickstart/model", build_engine_config(name))
    try:
        yield engine.address
    finally:
        engine.close()


def run_command(text: str) -> bool:
    """Run one in a shell, with this interpreter's programs first; say whether it went well."""
    print("+", text, flush=True)
    path = pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    return subprocess.run(["bash", "-c", text], cwd=ROOT, env={**environ, "PATH": path}).returncode == 0


def run_all(commands: list[Command]) -> list[str]:
    """Run them, and return a line for each that failed."""
    shutil.rmtree(ROOT / FOLDER, ignore_errors=True)
    (ROOT / FOLDER).mkdir(parents=True)
    failed = []
    for number, command in enumerate(commands):
        if command.engine and not (ROOT / ".engines" / command.engine / "bin" / "python").exists():
            print(f"SKIPPED, `make engines` has not been run: {command.shown}")
        elif command.engine and command.needs_server:
            with other_server(command.engine) as address:
                is_good = run_command(command.filled(number, address))
            failed += [] if is_good else [f"{command.readme}: {command.shown}"]
        elif not run_command(command.filled(number)):
            failed.append(f"{command.readme}: {command.shown}")
    return failed


def main() -> int:
    """Run what the READMEs show; return 1 where a command failed."""
    parser = argparse.ArgumentParser(description="run the commands that the READMEs show")
    parser.add_argument("--list", action="store_true", help="only say what would be run")
    parser.add_argument("--only", default="", help="commands that hold this text")
    options = parser.parse_args()
    commands = [command for command in commands_to_run() if options.only in command.shown]
    if options.list:
        for number, command in enumerate(commands):
            print(f"{command.readme}: {command.filled(number)}")
        return 0
    failed = run_all(commands)
    for line in failed:
        print(f"FAILED {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
