"""The modules of the package as text: their names, syntax trees and imports. Nothing is imported."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megagrpo"


def modules() -> Iterator[Path]:
    """Every module of the package, but the alias that engine processes import it by."""
    yield from (path for path in sorted(PACKAGE.rglob("*.py")) if "importable" not in path.parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    """The module's name below megagrpo, `` for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(name: str) -> str:
    return name.split(".")[0]


@cache
def imports_of(path: Path) -> tuple[str, ...]:
    """Absolute names that a module imports, anywhere in it; `from package import module` names the module."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                inner = PACKAGE.parent / full.replace(".", "/")
                is_module = inner.with_suffix(".py").is_file() or (inner / "__init__.py").is_file()
                found.append(full if is_module else node.module)
    return tuple(found)


def circles(edges: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Sets of nodes that reach one another (strongly connected components of more than one node)."""
    reach: dict[str, set[str]] = {}
    for start in edges:
        seen, waiting = set(), [start]
        while waiting:
            for node in edges.get(waiting.pop(), set()) - seen:
                seen.add(node)
                waiting.append(node)
        reach[start] = seen
    return {
        frozenset(other for other in reach if other in reach[node] and node in reach[other])
        for node in reach
        if node in reach[node]
    }


@cache
def top_level_names(module: str) -> set[str]:
    """Names that a module of ours defines, imports or contains as modules; none where it is not there."""
    inner = ROOT / module.replace(".", "/")
    path = inner / "__init__.py" if inner.is_dir() else inner.with_suffix(".py")
    if not path.is_file():
        return set()
    names = {each.stem for each in inner.glob("*")} if inner.is_dir() else set()
    waiting: list[ast.AST] = list(tree_of(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return names
