"""Documentation: the files, modules, commands and headings that it names exist."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from functools import cache
from pathlib import Path

import pytest

import flashmem

ROOT = Path(flashmem.__file__).parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
MOST_WORDS = 25_000
"""Of all pages but those of reference and research, which are not read from beginning to end."""
_BASES = (ROOT, ROOT / "flashmem", ROOT / "docs", ROOT / "kernels" / "templates")
_ENDINGS = (".py", ".j2", ".toml", ".md", ".txt", ".yml", ".yaml")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


by_page = pytest.mark.parametrize("page", PAGES, ids=_name)


@cache
def _files() -> tuple[Path, ...]:
    """All files of the repository except those of tools and caches."""
    files: list[Path] = []
    for folder, folders, names in os.walk(ROOT, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith((".", "__")) or name == ".ci"]
        files += [Path(folder, name) for name in names]
    return tuple(files)


@cache
def _names() -> frozenset[str]:
    return frozenset(file.name for file in _files())


def _quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def _is_file(name: str) -> bool:
    if "/" not in name:  # the page names the folder before
        return name in _names()
    return any(next(base.glob(name.rstrip("/")), None) is not None for base in _BASES)


def missing_files(text: str) -> list[str]:
    """Names in backticks that look like files of the repository, but do not exist."""
    blocks = "\n".join(re.findall(r"```.*?```", text, flags=re.DOTALL))
    drawn = re.findall(r"(?<![\w/.-])[a-z_]+/[\w/-]+\.(?:py|j2)\b", blocks)
    named = drawn + [name for name in _quoted(text) if re.fullmatch(r"\.?[a-z][\w.*-]*(/[\w.*-]+)*/?", name)]
    first = {path.name for path in (*ROOT.iterdir(), *(ROOT / "flashmem").iterdir()) if path.is_dir()}
    paths = [
        name
        for name in named
        if (name.endswith(_ENDINGS) and ("/" in name or name.endswith((".py", ".j2"))))
        or ("/" in name and name.split("/")[0] in first)
    ]
    return [name for name in paths if "NAME" not in name and not _is_file(name)]


def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def missing_names(text: str) -> list[str]:
    """Dotted names of flashmem, benchmarks and tests in backticks that cannot be imported."""
    dotted = r"\b(?<![./])(?:flashmem|benchmarks|tests)(?:\.[A-Za-z_]\w*)+"
    named = {match for quoted in _quoted(text) for match in re.findall(dotted, quoted)}
    return sorted(name for name in named if not name.endswith((".toml", ".flashmem", ".onnx")) and not _exists(name))


def missing_commands(text: str) -> list[str]:
    """Modules in `python -m` commands that do not exist."""
    named = set(re.findall(r"python -m ((?:benchmarks|tests|flashmem|profiler)(?:\.\w+)*)", text))
    return sorted(name for name in named if importlib.util.find_spec(name) is None)


@pytest.mark.parametrize("page", [CHANGELOG, *PAGES], ids=_name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert missing_files(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", [CHANGELOG, *PAGES], ids=_name)
def test_names_and_modules_on_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert missing_names(text) == []
    assert missing_commands(text) == []


@cache
def _anchors(page: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub generates them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return frozenset(re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain)


def _is_broken(target: str, source: Path) -> bool:
    path, _, anchor = target.partition("#")
    page = (source.parent / path).resolve() if path else source
    return not page.exists() or (bool(anchor) and anchor not in _anchors(page))


@by_page
def test_links_lead_to_pages_and_headings(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if "://" not in target and _is_broken(target, page)] == []


def test_pages_that_the_code_names_exist() -> None:
    sources = [file for file in _files() if file.suffix in (".py", ".j2", ".toml") and file.name != Path(__file__).name]
    named = {
        (source, target)
        for source in sources
        for target in re.findall(r"docs/[a-z/-]+\.md(?:#[a-z0-9-]+)?", source.read_text(encoding="utf-8"))
    }
    assert named
    broken = {f"{source.relative_to(ROOT)}: {target}" for source, target in named if _is_broken(target, ROOT / "README.md")}
    assert sorted(broken) == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS))


def test_what_is_to_be_read_is_short() -> None:
    aside = (DOCS / "reference", DOCS / "research")
    read = [page for page in PAGES if page.is_relative_to(DOCS) and not any(page.is_relative_to(folder) for folder in aside)]
    words = {_name(page): len(page.read_text(encoding="utf-8").split()) for page in read}
    assert sum(words.values()) <= MOST_WORDS, words


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == DOCS / "research"], ids=_name)
def test_a_page_of_research_has_a_date(page: Path) -> None:
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`planning/nowhere.py`", ["planning/nowhere.py"]),
        ("`nowhere.py`", ["nowhere.py"]),
        ("`planning/nowhere/`", ["planning/nowhere/"]),
        ("`planning/planner.py`, `kernels/templates/*/*.j2`, `bundle.py`, `x/y`", []),
    ],
)
def test_a_file_that_is_gone_is_found(text: str, missing: list[str]) -> None:
    assert missing_files(text) == missing


def test_a_name_that_is_gone_is_found() -> None:
    text = "`flashmem.Session` `flashmem.nothing`, `flashmem.base.units.nothing`, `benchmarks.stress --runs 1`"
    assert missing_names(text) == ["benchmarks.stress", "flashmem.base.units.nothing", "flashmem.nothing"]
    assert missing_commands("python -m tests.nothing and python -m flashmem") == ["tests.nothing"]
