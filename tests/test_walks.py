"""docs/walks.md leads from file to file as the code does, and no walk gets longer."""

import ast
import re
from pathlib import Path

import pytest
from source_tree import PACKAGE, ROOT, tree_of

WALKS = {
    "One prompt to its loss": (25, 37),
    "One reward": (14, 19),
    "One weight tensor to a vLLM server": (16, 23),
    "One checkpoint save": (12, 16),
}
"""Sections of docs/walks.md, with the files that each may have, and may have with those beside the way."""


OUTSIDE_REACH = {"", "registry", "Megatron", "socket"}
"""What else may lead to a file than one of the walk: nothing where it begins, or what calls it by no name."""


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_is_short_and_leads_from_file_to_file(walk):
    """Each row's file defines what is called there; the file that it is reached from comes before, and names
    that.
    """
    page = (ROOT / "docs/walks.md").read_text()
    section = re.search(rf"^## {walk}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)[1]
    rows = [
        [cell.strip(" `") for cell in row]
        for row in re.findall(r"^\| `(.*?)\|(.*?)\|(.*?)\|.*\|$", section, re.MULTILINE)
    ]
    files = [file for file, *_ in rows]
    most, most_of_both = WALKS[walk]
    assert len(set(files)) == len(files) <= most and f"t most {most} files" in section
    for number, (file, called, reached_from) in enumerate(rows):
        assert called in definitions_of(PACKAGE / file), f"{file} defines no {called}"
        if reached_from not in OUTSIDE_REACH:
            assert reached_from in files[:number], f"{file}: {reached_from} does not come before"
            assert called in names_in(PACKAGE / reached_from), f"{reached_from} does not name {called}"
    beside = re.findall(r"`([\w/]+\.py)`", section[section.index("Beside the way") :])
    assert beside and all((PACKAGE / file).is_file() for file in beside) and not set(beside) & set(files)
    assert len(files) + len(beside) <= most_of_both
    assert f"| {walk[0].lower()}{walk[1:]} | {len(files)} | {len(files) + len(beside)} |" in page


def definitions_of(path: Path) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(tree_of(path)) if isinstance(node, kinds)}


def names_in(path: Path) -> set[str]:
    """Names, attributes and texts in a module's code."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found
