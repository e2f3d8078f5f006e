"""Every command that a README shows is run by a target: here or as an example's first block, or by CI."""

import re
from pathlib import Path

import pytest
import readme_commands
from check_examples import read_commands, read_figures
from readme_commands import BY_CI, Command, commands_to_run, run_all, shown_commands

READMES = [Path("README.md"), *sorted(Path("examples").glob("*/README.md"))]
README = """
```
make here TWO=2        # a comment
megagrpo run a.yaml \\
    b=c
```

```yaml
run: {steps: 1}
```

```
step 1/2  reward 0.5
```

```
python x.py '#1'
```
"""


def test_commands_are_read_without_comments_and_other_blocks_are_none():
    assert shown_commands(README) == ["make here TWO=2", "megagrpo run a.yaml b=c", "python x.py '#1'"]


@pytest.mark.parametrize("path", READMES, ids=str)
def test_every_shown_command_is_run_by_a_target(path):
    """A line that begins with a program of ours, in any block, is among those that are run."""
    text = path.read_text()
    shown = re.findall(r"^(?:megagrpo|torchrun|python|make) .*?(?=\s+#|\s*\\?$)", text, re.MULTILINE)
    run = [" ".join(words) for words in read_commands(text)] if path.parent.name else []
    run += [command.shown for command in commands_to_run() if command.readme == str(path)]
    ci = Path(".ci/run").read_text()
    for line in shown:
        by_ci = line.startswith(BY_CI) and line in ci
        assert by_ci or any(
            each.startswith(line.replace("'", "")) or each.startswith(line) for each in run
        ), line
    assert shown


def test_no_name_that_stands_for_the_readers_own_is_left():
    """Files that are named are there, or made by an earlier command."""
    made = {"runs/readme/mine.yaml", "runs/readme/gsm8k_train.jsonl", "runs/readme/gsm8k_test.jsonl"}
    for number, command in enumerate(commands_to_run()):
        text = command.filled(number, "http://127.0.0.1:1")
        assert not re.search(r"NAME|CONFIG\.yaml|my-hf|host1|FILE", text), text
        for word in re.findall(r"[\w./-]+\.(?:yaml|jsonl|py)\b", text):
            assert Path(word).exists() or word in made, (word, text)


def test_a_command_that_fails_is_named_and_the_others_are_run(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(readme_commands, "ROOT", tmp_path)
    commands = [Command("README.md", "make -f none"), Command("README.md", "python -c 'print(6 * 7)'")]
    assert run_all(commands) == ["README.md: make -f none"]
    assert "42" in capfd.readouterr().out.splitlines()


def test_a_line_of_an_engine_that_is_not_installed_is_skipped_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(readme_commands, "ROOT", tmp_path)
    line = "megagrpo run CONFIG.yaml engine.name=vllm"
    assert run_all([Command("README.md", line)]) == []
    assert f"SKIPPED, `make engines` has not been run: {line}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("example", "run_dir", "row", "pattern"),
    [
        (
            "quickstart",
            "runs/quickstart",
            "`make quickstart`: sampled",
            r"{} before, {} after; greedy [0-9.]+, {}",
        ),
        (
            "smollm2_arithmetic",
            "runs/smollm2_arithmetic",
            "`make smollm2`: sampled",
            r"{} before, {} after .*greedy [0-9.]+, {}",
        ),
    ],
)
def test_the_figures_of_the_readme_are_within_those_that_its_example_is_held_to(
    example, run_dir, row, pattern
):
    """`make examples` compares the ranges with what the runs come to."""
    (line,) = (line for line in Path("README.md").read_text().splitlines() if line.startswith(f"| {row}"))
    stated = re.search(pattern.replace("{}", "([0-9.]+)"), line).groups()
    ranges = {
        figure.name: figure
        for figure in read_figures(Path("examples", example, "README.md").read_text())
        if figure.run_dir == run_dir
    }
    for name, value in zip(
        ("eval.sampled.first", "eval.sampled.last", "eval.greedy.last"), stated, strict=True
    ):
        assert ranges[name].low <= float(value) <= ranges[name].high, name
