"""The documentation says what the code says: its reference is made from it, what it names exists."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from megagrpo import cli
from megagrpo.config.mistakes import field_places
from megagrpo.config.schema import Config
from megagrpo.planning.config_help import LISTS, merged_fields
from megagrpo.planning.metric_dictionary import find

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
LAUNCH = ROOT / "examples" / "launch"

sys.path.insert(0, str(ROOT / "tools"))
import make_reference  # noqa: E402


@pytest.mark.parametrize("name", make_reference.PAGES)
def test_the_reference_is_what_the_code_says(name):
    assert (ROOT / "docs" / "reference" / name).read_text() == make_reference.PAGES[name](), (
        "run python tools/make_reference.py"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_field_that_a_page_names_exists(page):
    places = {*field_places(Config), *(field.place for field in merged_fields())}
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*|: [^`]*)?`", page.read_text())
    ours = [place for place in named if place.split(".")[0] in Config.model_fields]
    theirs = {  # other trainers' fields, whose first word is a section of ours
        "data.train_batch_size",
        "data.max_prompt_length",
        "data.max_response_length",
        "rollout.n",
        "rollout.name",
        "rollout.tensor_model_parallel_size",
        "checkpoint.every",
    }
    assert not [place for place in ours if place not in places and place not in theirs]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_metric_and_command_that_a_page_names_exists(page):
    text = page.read_text()
    for name in re.findall(r"`((?:reward|rollout|update|policy|time|optimizer|eval)/[a-z_/]+)\*?`", text):
        assert find(name) is not None, name
    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    for command in re.findall(r"megagrpo ([a-z-]+)", text):
        if f"`megagrpo {command}" in text or f"\nmegagrpo {command}" in text:
            assert command in {name.replace("_", "-") for name in commands}, command
    for name in re.findall(r"megagrpo config ([a-z]+)[`\s]", text):
        assert name in LISTS or name in Config.model_fields, name


@pytest.mark.parametrize("file", sorted(LAUNCH.glob("*")), ids=lambda file: file.name)
def test_a_launch_file_starts_what_exists_with_options_that_exist(file):
    text = file.read_text()
    if file.suffix == ".yaml":
        assert yaml.safe_load(text)
    options = set(re.findall(r"megagrpo run[^\n]*(?:\\?\n +[^\n]*--[^\n]*)*", text))
    known = {"--nproc", "--nnodes", "--node-rank", "--rendezvous", "--max-restarts", "--dry-run"}
    for command in options:
        assert set(re.findall(r"(?<!\S)--[a-z-]+", command)) <= known, command
    assert "megagrpo" in text
