"""The plan of the house holds: imports point down, no circles, small files, and READMEs that tell the truth.

Each exception stands in a table here with its reason. One that is not needed any more fails, so that the
tables only ever grow by a decision.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from source_tree import (
    PACKAGE,
    ROOT,
    circles,
    imports_of,
    modules,
    name_of,
    room_of,
    top_level_names,
    tree_of,
)

# From the top down: what stands on one line may import what stands below it, and of its own line what makes
# no circle.
LAYERS = (
    ("__main__",),
    ("cli", "generate"),
    ("train", "cli_generate"),
    ("run",),
    ("trainer", "session", "sampling"),
    ("serving",),
    ("run_inputs",),
    ("checkpoint", "fleet", "planning"),
    ("weights", "evaluation"),
    ("policy", "rollout"),
    ("engines",),
    ("models", "rewards", "algorithms", "telemetry", "supervision", "wire", "host"),
    ("ops", "parallel", "device"),
    ("config", "registry", "types", "errors"),
)
LEVEL = {room: level for level, rooms in enumerate(reversed(LAYERS)) for room in rooms}

# Rooms, or modules, that must stay free of what would tie them to one machine or one engine.
ENGINES = ("megatron", "vllm", "sglang", "transformer_engine")
FOREIGN = {
    "algorithms": ENGINES,
    "rewards": (*ENGINES, "torch"),
    "config": (*ENGINES, "torch", "transformers"),
    "planning": ENGINES,
    "wire": (*ENGINES, "transformers", "pydantic"),
    "weights/plan": (*ENGINES, "torch"),
    "parallel/layout.py": (*ENGINES, "torch"),
}

FILE_LINES, TEST_FILE_LINES, FUNCTION_LINES, ROOM_SHARE = 300, 400, 80, 0.15
LONG_FILES = {
    "wire/bucket_manifest.py": "one format, written and read",
}
LONG_FUNCTIONS = {}
SHARED_NAMES = {
    "base": "the contract of its room, wherever it stands",
    "server": "starts the server of its engine: one for vLLM, one for SGLang",
}
"""Names that several modules bear, with what they mean alike."""
WHOLE = ("Config", "Session")
"""What no part takes: it takes its own section, or the parts that it needs."""
TAKE_THE_WHOLE = {
    "config/load.py dump_config": "writes it",
    "checkpoint/resume.py check_config": "compares it with a saved one, field by field",
    "planning/checks.py verify_config": "gives each check its sections",
    "planning/checks.py check_config": "gives each check its sections",
    "planning/components.py verify_components": "looks every part of a run up",
    "planning/data_checks.py verify_data": "gives each data set its sections",
    "planning/dry_run.py print_dry_run": "shows it",
    "planning/dry_run.py format_dry_run": "shows what of it is no default",
    "planning/inputs.py format_inputs": "opens what a run would open",
    "planning/memory_table.py format_memory": "gives the plan of memory its sections",
    "planning/memory_table.py memory_settings": "gives the plan of memory its sections",
    "telemetry/model_card.py write_model_card": "describes the run as a whole",
    "telemetry/model_card.py format_model_card": "describes the run as a whole",
    "train.py start_rank": "the run, behind what watches it",
    "train.py _train": "hands it on",
    "generate.py work": "hands it on",
    "sampling.py open_sampler": "wiring",
    "sampling.py evaluate": "wiring",
    "sampling.py sample": "wiring",
    "sampling.py _name_weights": "names what was evaluated, by three sections",
    "serving.py build_rewards": "wiring",
    "serving.py load_model": "wiring",
    "serving.py build_batches": "wiring",
    "serving.py build_generator": "wiring",
    "serving.py connect_weights": "wiring",
    "run.py run_training": "the wiring of the loop",
    "run.py build_update": "wiring",
    "run.py build_checkpoints": "wiring",
    "run.py build_evaluator": "wiring",
    "run.py build_export": "wiring",
    "run.py build_recorder": "wiring",
    "run_inputs.py read_inputs": "wiring",
    "session.py build_session": "the wiring of the parts",
    "session.py _build_models": "wiring",
    "session.py _build_updater": "wiring",
}
UPWARD: dict[tuple[str, str], str] = {}
CIRCLES: dict[frozenset[str], str] = {}
# What names pickles. Reading one runs what it says: beside these places each is an open door.
PICKLES = {
    "models/restricted_pickles.py pickle": "reads torch's own by a list of names",
    "models/megatron_files.py pickle": "names the error of a refused one",
}
PICKLING_CALLS = (
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
)
PICKLING_MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")
READ_ELSEWHERE: dict[str, str] = {}
"""Fields of the configuration that no code names, with who reads them."""


def own_imports() -> Iterator[tuple[Path, str, str]]:
    """(file, its module's name, name below megagrpo of what it imports) of every import of ours."""
    for path in modules():
        for name in imports_of(path):
            if name.split(".")[0] == "megagrpo":
                yield path, name_of(path), name.removeprefix("megagrpo").removeprefix(".")


def check_exceptions(found: set, allowed: Mapping) -> None:
    """Fail on what is found and not allowed, and on what is allowed and not found any more."""
    assert not found - allowed.keys(), f"new: {sorted(map(str, found - allowed.keys()))}"
    assert not allowed.keys() - found, f"not needed any more: {sorted(map(str, allowed.keys() - found))}"


def test_every_room_has_its_place():
    rooms = {room_of(name_of(path)) for path in modules()} - {"", "__init__"}
    assert rooms == LEVEL.keys(), rooms ^ LEVEL.keys()


def test_imports_point_down():
    found = set()
    for path, name, imported in own_imports():
        if not imported:
            continue
        if LEVEL[room_of(imported)] > LEVEL[room_of(name)]:
            found.add((path.relative_to(PACKAGE).as_posix(), f"megagrpo.{imported}"))
    check_exceptions(found, UPWARD)


def test_modules_make_no_circle():
    edges: dict[str, set[str]] = {}
    for _, name, imported in own_imports():
        edges.setdefault(name, set()).add(imported)
    for name in edges:
        edges[name] -= {name, ""}
    check_exceptions(circles(edges), CIRCLES)


def test_rooms_make_no_circle_beside_the_upward_imports():
    edges: dict[str, set[str]] = {}
    for path, name, imported in own_imports():
        if (path.relative_to(PACKAGE).as_posix(), f"megagrpo.{imported}") not in UPWARD and imported:
            edges.setdefault(room_of(name), set()).add(room_of(imported))
    for room in edges:
        edges[room].discard(room)
    assert circles(edges) == set()


@pytest.mark.parametrize("place", FOREIGN)
def test_pure_parts_import_nothing_foreign(place):
    paths = [PACKAGE / place] if place.endswith(".py") else sorted((PACKAGE / place).rglob("*.py"))
    assert paths
    wrong = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in paths
        for name in imports_of(path)
        if name.split(".")[0] in FOREIGN[place]
    ]
    assert not wrong


def test_the_wire_imports_nothing_of_ours_and_hosts_import_the_wire_alone():
    wrong = [
        (name, imported)
        for _, name, imported in own_imports()
        if (room_of(name) == "wire" and room_of(imported) != "wire")
        or (room_of(name) == "host" and room_of(imported) not in ("host", "wire"))
    ]
    assert not wrong


def test_nothing_exchanges_or_reads_pickles_beside_the_restricted_reader():
    """torch.load takes pickles too where it is not told otherwise, so that nobody calls it."""
    found = set()
    for path in modules():
        place = path.relative_to(PACKAGE).as_posix()
        found |= {f"{place} {name}" for name in imports_of(path) if name.split(".")[0] in PICKLING_MODULES}
        for node in ast.walk(tree_of(path)):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute):
                is_load = called.attr == "load" and ast.unparse(called.value) == "torch"
                if called.attr in PICKLING_CALLS or is_load:
                    found.add(f"{place} {called.attr}")
    check_exceptions(found, PICKLES)


def test_a_transport_has_at_most_twelve_methods():
    """What a transport must do is small; a selection says what is sent."""
    transport = next(
        node
        for node in tree_of(PACKAGE / "weights/transports/base.py").body
        if isinstance(node, ast.ClassDef) and node.name == "Transport"
    )
    methods = [each.name for each in transport.body if isinstance(each, ast.FunctionDef)]
    assert len([name for name in methods if not name.startswith("_")]) <= 12


def test_files_are_short():
    long = {
        path.relative_to(PACKAGE).as_posix()
        for path in modules()
        if len(path.read_text().splitlines()) > FILE_LINES
    }
    check_exceptions(long, LONG_FILES)


def test_files_of_tests_are_about_one_subject():
    long = {
        path.relative_to(ROOT).as_posix()
        for folder in ("tests", "tools", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if len(path.read_text().splitlines()) > TEST_FILE_LINES
    }
    assert not long


def test_functions_are_short():
    long = {
        f"{path.relative_to(PACKAGE).as_posix()} {node.name}"
        for path in modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    }
    check_exceptions(long, LONG_FUNCTIONS)


def test_no_two_modules_share_a_name_with_another_meaning():
    names = Counter(path.stem for path in modules() if not path.stem.startswith("__"))
    check_exceptions({name for name, count in names.items() if count > 1}, SHARED_NAMES)


def test_no_two_classes_share_a_name():
    names = Counter(
        node.name for path in modules() for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, count in names.items() if count > 1}


def test_comments_say_what_they_mean():
    """`# of the slowest rank` leaves the reader to find out what of it is meant."""
    unclear = [
        f"{path.relative_to(PACKAGE)}:{token.start[0]}: {token.string}"
        for path in modules()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.COMMENT and re.match(r"#+ *of\b", token.string, re.IGNORECASE)
    ]
    assert not unclear


def test_docstrings_begin_with_a_sentence():
    """The arguments come below it, indented."""
    without = [
        f"{path.relative_to(PACKAGE)} {node.name}"
        for path in modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and re.match(r"(Args|Returns|Raises):", ast.get_docstring(node) or "")
    ]
    assert not without


def test_no_room_is_more_than_a_share_of_the_house():
    lines: dict[str, int] = {}
    for path in modules():
        room = room_of(name_of(path))
        lines[room] = lines.get(room, 0) + len(path.read_text().splitlines())
    whole = sum(lines.values())
    assert not {room: count for room, count in lines.items() if count > ROOM_SHARE * whole}


def test_every_name_that_is_imported_from_the_package_is_there():
    """Workers of tests, tools and examples are processes of their own, whose imports pytest does not see."""
    wrong = []
    for folder in ("megagrpo", "tests", "tools", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megagrpo":
                    known = top_level_names(node.module)
                    wrong += [
                        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {alias.name}"
                        for alias in node.names
                        if alias.name not in known
                    ]
    assert wrong == []


def test_parts_take_their_own_section_never_the_whole():
    """As an argument or an attribute; the entry points, the wiring and what is about the whole may."""
    found = set()
    for path in modules():
        for scope in ast.walk(tree_of(path)):
            if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = scope.args
                taken = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                annotations = [each.annotation for each in taken]
            elif isinstance(scope, ast.ClassDef):
                annotations = [each.annotation for each in scope.body if isinstance(each, ast.AnnAssign)]
            else:
                continue
            words = [word for each in annotations if each for word in re.findall(r"\w+", ast.unparse(each))]
            if set(words) & set(WHOLE):
                found.add(f"{path.relative_to(PACKAGE).as_posix()} {scope.name}")
    check_exceptions(found, TAKE_THE_WHOLE)


def test_every_field_of_the_configuration_is_read():
    """By its name, as an attribute or as a word in code, outside of where it is declared."""
    from megagrpo.config.schema import Config

    names = set()

    def collect(model) -> None:
        for name, field in model.model_fields.items():
            names.add(name)
            for part in _models_in(field.annotation):
                collect(part)

    collect(Config)
    read = set()
    for path in modules():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif path.parent.name != "config" and isinstance(node, ast.Constant):
                read.add(node.value)
    check_exceptions(names - read, READ_ELSEWHERE)


def _models_in(annotation) -> Iterator[type]:
    """Sections anywhere in a type."""
    from typing import get_args

    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


@pytest.mark.parametrize("readme", sorted(PACKAGE.glob("*/README.md")), ids=lambda readme: readme.parent.name)
def test_the_file_table_of_a_readme_names_every_file_once_there(readme):
    """A table whose first column is `file`: names of files, or of folders for all that is in them."""
    folder = readme.parent
    tables = re.findall(r"^\| file \|.*\n\|[-| ]+\n((?:\|.*\n?)+)", readme.read_text(), re.MULTILINE)
    rows = [row.split("|")[1] for table in tables for row in table.splitlines()]
    named = {name for cell in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", cell)}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    there = {name for name in there if Path(name).name != "__init__.py"}
    missing = {name for name in named if not (folder / name).exists()}
    folders = tuple(name for name in named if name.endswith("/"))
    covered = {name for name in there if name in named or (folders and name.startswith(folders))}
    assert not missing, f"{readme.parent.name}/README.md names what is not there: {sorted(missing)}"
    assert there == covered, f"{readme.parent.name}/README.md does not name: {sorted(there - covered)}"


def test_every_package_has_a_readme_with_a_file_table():
    rooms = {path.parent for path in PACKAGE.glob("*/__init__.py")}
    without = [room.name for room in rooms if not (room / "README.md").is_file()]
    assert not without


def test_links_between_the_projects_pages_lead_somewhere():
    folders = ("megagrpo", "docs", "examples", "tests", "docker", "configs")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert pages
    assert not broken
