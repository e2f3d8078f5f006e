"""Tests of megagrpo.registry."""

import math
import pickle
import subprocess
import sys

import pytest

from megagrpo.errors import UserError
from megagrpo.registry import is_code_place, load_callable


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_module_and_file_functions_are_found(tmp_path):
    path = write(tmp_path, "reward_a.py", "def score(x):\n    return x + 1\n")
    assert load_callable("math:sqrt") is math.sqrt
    assert load_callable(f"{path}:score")(1) == 2


def test_a_file_is_imported_once_and_may_import_its_neighbour(tmp_path):
    write(tmp_path, "neighbour_of_reward_b.py", "OFFSET = 10\n")
    path = write(
        tmp_path,
        "reward_b.py",
        "from neighbour_of_reward_b import OFFSET\ndef score(x):\n    return x + OFFSET\n",
    )
    assert load_callable(f"{path}:score")(1) == 11
    assert load_callable(f"{path}:score") is load_callable(f"{path}:score")


def test_dataclasses_of_a_loaded_file_can_be_pickled(tmp_path):
    path = write(
        tmp_path, "reward_c.py", "from dataclasses import dataclass\n@dataclass\nclass Row:\n    value: int\n"
    )
    row = load_callable(f"{path}:Row")(3)
    assert pickle.loads(pickle.dumps(row)) == row


def test_two_files_of_one_name_do_not_mix(tmp_path):
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, "reward.py", f"def score():\n    return {value}\n")
    assert [load_callable(f"{tmp_path / folder}/reward.py:score")() for folder in ("one", "two")] == [1, 2]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reward.py", "is not FILE.py:name"),
        ("reward.py:", "is not FILE.py:name"),
        (":score", "is not FILE.py:name"),
        ("/nowhere/reward.py:score", "no file /nowhere/reward.py"),
        ("no_such_package_here:score", "raised ModuleNotFoundError"),
        ("math:sqr", "did you mean sqrt"),
        ("math:pi", "is a float, not a function"),
    ],
)
def test_a_wrong_name_is_one_clear_line(spec, message):
    with pytest.raises(UserError, match=message) as caught:
        load_callable(spec)
    assert "\n" not in str(caught.value)


def test_a_file_that_fails_on_import_is_named_and_can_be_mended(tmp_path):
    path = write(tmp_path, "reward_d.py", "raise ValueError('broken\\nfile')\n")
    with pytest.raises(UserError, match=r"reward_d.py raised ValueError: broken file"):
        load_callable(f"{path}:score")
    path.write_text("def score():\n    return 'mended'\n")
    assert load_callable(f"{path}:score")() == "mended"


def test_data_paths_are_not_taken_for_callables():
    assert is_code_place("rows.py:train") and is_code_place("package.rows:train")
    assert not is_code_place("data/train.jsonl") and not is_code_place("train")


def test_importing_it_needs_no_torch():
    code = "import sys, megagrpo.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_an_unknown_family_is_offered_the_field_that_names_one_of_the_users():
    from megagrpo.models.families import load_all
    from megagrpo.models.family import FAMILIES

    load_all()
    with pytest.raises(UserError) as caught:
        FAMILIES.get("gemma2")
    assert str(caught.value).endswith("and one of yours that model.family names, FILE.py:CLASS")
