"""Configuration files that would take all memory, or never end, are refused in one line."""

import os
import time

import pytest

from megagrpo.config.load import load_config
from megagrpo.config.yaml_core import MAX_NODES, parse_yaml, read_yaml_file
from megagrpo.errors import ConfigError


def line_of(call, *arguments):
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


def bomb(levels, width=10, form="[{}]"):
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} {form.format(', '.join([f'*a{n - 1}'] * width))}" for n in range(1, levels + 1)]
    return "\n".join(lines)


def test_aliases_that_write_out_to_too_much_are_refused_at_once():
    began = time.monotonic()
    line = line_of(parse_yaml, bomb(60), "run.yaml")
    assert time.monotonic() - began < 5
    assert line.startswith("run.yaml: not valid YAML: with its aliases written out it holds ")
    assert line.endswith(f" values, {MAX_NODES:,} at most")


def test_merged_mappings_that_write_out_to_too_much_are_refused():
    lines = ["a0: &a0 {k0: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}], k{n}: 1}}" for n in range(1, 40)]
    assert "aliases written out" in line_of(parse_yaml, "\n".join(lines), "run.yaml")


def test_an_override_is_bounded_alike():
    text = "[&a [1, 1], &b [*a, *a, *a, *a, *a, *a, *a, *a], &c [*b, *b, *b, *b, *b, *b, *b, *b]"
    for name, before in zip("defghi", "cdefgh", strict=True):
        text += f", &{name} [{', '.join([f'*{before}'] * 8)}]"
    assert "aliases written out" in line_of(
        load_config, "examples/quickstart/quickstart.yaml", [f"rollout.stop={text}]"]
    )


def test_aliases_in_measure_are_read():
    text = bomb(3)
    assert parse_yaml(text, "x")["a3"] == [[[["x", "x"]] * 10] * 10] * 10
    assert parse_yaml("a: &a {k: 1}\nb: [*a, *a]\n", "x")["b"] == [{"k": 1}, {"k": 1}]


def test_an_alias_of_what_it_lies_in_is_refused_with_its_line():
    line = line_of(parse_yaml, "run:\n  steps: &a [1, *a]\n", "run.yaml")
    assert line == "run.yaml, line 2, column 10: not valid YAML: an alias refers to what it lies in"


def test_nesting_without_end_is_refused():
    assert line_of(parse_yaml, "[" * 5000 + "]" * 5000, "x") == "x: not valid YAML: nested too deep"


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_a_base_that_is_no_file_is_refused_and_not_read(tmp_path, kind):
    base = {"folder": tmp_path / "folder", "pipe": tmp_path / "pipe", "device": "/dev/zero"}[kind]
    if kind == "folder":
        base.mkdir()
    elif kind == "pipe":
        os.mkfifo(base)
    path = tmp_path / "run.yaml"
    path.write_text(f"base: {base}\n")
    assert line_of(load_config, path) == f"{path}: base: {base}: is no file (a folder, a device or a pipe)"
    what = "a folder" if kind == "folder" else "a device or a pipe"
    assert line_of(read_yaml_file, tmp_path / base) == f"{base}: is {what}, not a file"
