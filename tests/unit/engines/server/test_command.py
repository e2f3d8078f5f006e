"""Which Python runs an engine, and what is said where there is none."""

import sys

import pytest

from megagrpo.engines.server.command import EnginePackage, find_python
from megagrpo.errors import UserError

ABSENT = EnginePackage("an_engine", ("an-engine", "an-engine-cpu"), (0, 32))


def fake_python(folder, version):
    """An executable that answers every question with `version`."""
    folder.mkdir(parents=True)
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


def test_an_engine_that_is_nowhere_is_named_with_the_ways_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as raised:
        find_python(None, ABSENT)
    assert "`make engines`" in str(raised.value) and "pip install 'megagrpo[an_engine]'" in str(raised.value)


def test_the_environment_of_make_engines_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = fake_python(tmp_path / ".engines" / "an_engine" / "bin", "0.32.1+cpu")
    assert find_python(None, ABSENT) == str(made)


def test_this_python_comes_first_and_a_named_one_before_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake_python(tmp_path / ".engines" / "pytest" / "bin", "1.0")
    here = EnginePackage("pytest", ("no-such-name", "pytest"), (1, 0))
    assert find_python(None, here) == sys.executable
    named = fake_python(tmp_path / "other", "2.0")
    assert find_python(str(named), here) == str(named)


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.19.1", "version 0.19.1 .* at least 0.32 is needed"), ("", "has none of an-engine, an-")],
)
def test_a_version_that_is_too_old_or_absent_is_told(tmp_path, version, message):
    with pytest.raises(UserError, match=message):
        find_python(str(fake_python(tmp_path / "old", version)), ABSENT)


def test_a_python_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match=r"engine.server.python: .*/none: no such file"):
        find_python(str(tmp_path / "none"), ABSENT)
