"""What the documentation's site shows beside `docs/`: every file of the repository that a page links to.

MkDocs calls `on_files` and `on_page_markdown` (hooks of mkdocs.yml). Links stay as they are in the Markdown
files, where they lead to the file itself; on the site they lead to a page that shows it. A link to what does
not exist is left as it is, and fails the build.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "repository"  # of the site: pages that show files outside docs/
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
SHOWN_AS_TEXT = {
    ".py": "python",
    ".yaml": "yaml",
    ".sh": "bash",
    ".sbatch": "bash",
    ".txt": "text",
    "": "text",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the files that pages link to, and those that these link to."""
    waiting = [file.abs_src_path for file in files.documentation_pages() if file.abs_src_path]
    seen: set[Path] = set()
    while waiting:
        for target in _linked(Path(waiting.pop())):
            if target in seen or target.is_relative_to(config.docs_dir):
                continue
            seen.add(target)
            files.append(_page(target, config))
            if target.suffix == ".md":
                waiting.append(str(target))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead each link to the page of the site that shows what it means."""
    here = posixpath.dirname(page.file.src_uri)
    source = _source(page.file.src_uri, config)

    def rewrite(link: re.Match[str]) -> str:
        target = _target(source, link[1])
        if target is None:
            return link[0]
        return posixpath.relpath(_place(target, config), here or ".") + link[2]

    return LINK.sub(rewrite, markdown)


def _linked(page: Path) -> Iterator[Path]:
    for link in LINK.finditer(page.read_text(encoding="utf-8")):
        if (target := _target(page, link[1])) is not None:
            yield target


def _target(page: Path, link: str) -> Path | None:
    """Return the file of the repository that a link means; a folder means its README."""
    target = (page.parent / link).resolve()
    if target.is_dir():
        target /= "README.md"
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _place(target: Path, config: Any) -> str:
    """Return where the site has a file."""
    if target.is_relative_to(config.docs_dir):
        return target.relative_to(config.docs_dir).as_posix()
    place = f"{FOLDER}/{target.relative_to(ROOT).as_posix()}"
    return f"{place}.md" if target.suffix in SHOWN_AS_TEXT else place


def _source(place: str, config: Any) -> Path:
    """Return the file that a page of the site was made of."""
    if not place.startswith(f"{FOLDER}/"):
        return Path(config.docs_dir) / place
    source = ROOT / place.removeprefix(f"{FOLDER}/")
    return source if source.is_file() else source.with_suffix("")


def _page(target: Path, config: Any) -> File:
    place = _place(target, config)
    if target.suffix not in SHOWN_AS_TEXT:
        return File.generated(config, place, abs_src_path=str(target))
    text = target.read_text(encoding="utf-8")
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    name = target.relative_to(ROOT).as_posix()
    return File.generated(
        config, place, content=f"# {name}\n\n{fence}{SHOWN_AS_TEXT[target.suffix]}\n{text}\n{fence}\n"
    )
