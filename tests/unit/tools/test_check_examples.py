"""What the READMEs of the examples state is read, run and compared."""

import json
import subprocess
from pathlib import Path

import pytest
from check_examples import Figure, check_example, find_number, read_commands, read_figures

EXAMPLES = sorted(Path("examples").glob("*/README.md"))
README = """# An example

```
python write.py {value}     # writes the summary
```

| run folder | figure | range |
|---|---|---|
| `runs/x` | `eval.sampled.last` | 0.5 to 0.75 |
"""
WRITE = """import json, pathlib, sys
folder = pathlib.Path("runs/x")
folder.mkdir(parents=True)
(folder / "summary.json").write_text(json.dumps({"eval": {"sampled": {"last": float(sys.argv[1])}}}))
"""


@pytest.fixture
def example(tmp_path):
    """A function: value that the example's run comes to -> its folder, which is the root too."""

    def make(value):
        (tmp_path / "write.py").write_text(WRITE)
        (tmp_path / "README.md").write_text(README.format(value=value))
        return tmp_path

    return make


@pytest.mark.parametrize(("value", "is_as_stated"), [(0.5, True), (0.75, True), (0.76, False), (0.49, False)])
def test_a_figure_outside_its_range_is_found(example, value, is_as_stated):
    folder = example(value)
    (outcome,) = check_example(folder, root=folder)
    assert outcome.figure == Figure("runs/x", "eval.sampled.last", 0.5, 0.75)
    assert (outcome.found, outcome.is_as_stated) == (value, is_as_stated)


def test_a_command_that_fails_is_told(example):
    with pytest.raises(subprocess.CalledProcessError):
        check_example(example("no number"), root=example("no number"))


def test_a_number_that_is_not_there_is_not_as_stated():
    assert find_number({"eval": {}}, "eval.sampled.last") is None
    assert find_number({"eval": 1.0}, "eval.sampled.last") is None
    assert find_number(json.loads('{"max_logprob_gap": null}'), "max_logprob_gap") is None


def test_a_readme_that_states_nothing_is_an_error():
    with pytest.raises(ValueError, match="no figure"):
        read_figures("# Nothing")
    with pytest.raises(ValueError, match="no command"):
        read_commands("```\n# only a comment\n```\n")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_every_example_shows_commands_whose_files_exist_and_states_figures(path):
    readme = path.read_text()
    commands = read_commands(readme)
    assert {words[0] for words in commands} <= {"python", "torchrun", "megagrpo"}
    named = [word for words in commands for word in words if word.endswith((".py", ".yaml"))]
    assert named and all(Path(word).exists() for word in named)
    assert all(figure.low <= figure.high for figure in read_figures(readme))
