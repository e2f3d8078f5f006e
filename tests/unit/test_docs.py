"""The documentation says what the code says: its reference is made from it, what it names exists."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

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


def build_site(root, site):
    """Build the site of a repository's docs; return (exit code, what was said)."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text()) | {"site_dir": str(site)}
    (root / "mkdocs.yml").write_text(yaml.safe_dump(config))
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return run.returncode, run.stdout + run.stderr


@pytest.fixture
def repository(tmp_path):
    """A copy of what the documentation is made of, and links to."""
    for name in ("docs", "megagrpo", "examples", "tools", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    for path in (*ROOT.glob("*.md"), ROOT / "Makefile"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_the_site_is_built_and_each_of_its_links_leads_somewhere(repository, tmp_path):
    code, said = build_site(repository, tmp_path / "site")
    assert code == 0, said
    home = (tmp_path / "site" / "index.html").read_text()
    assert 'href="start/"' in home and 'href="repository/CONTRIBUTING/"' in home
    shown = (tmp_path / "site" / "repository" / "megagrpo" / "trainer.py" / "index.html").read_text()
    assert "class Trainer" in re.sub("<[^>]+>", "", shown)
    fetched = re.findall(r'(?:src|href)="(https?://[^"]+)"', home)
    assert {urlsplit(address).hostname for address in fetched} <= {"squidfunk.github.io"}, "theme's own name"


@pytest.mark.parametrize("link", ["no_page.md", "../megagrpo/no_module.py", "concepts.md#no-section"])
def test_a_link_that_leads_nowhere_fails_the_site(repository, tmp_path, link):
    with (repository / "docs" / "start.md").open("a") as page:
        page.write(f"\n[more]({link})\n")
    code, said = build_site(repository, tmp_path / "site")
    assert code != 0 and link.rpartition("#")[0].rpartition("/")[2] in said


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
