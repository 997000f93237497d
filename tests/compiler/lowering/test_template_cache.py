"""The cache of compiled templates: the same kernels as without it; private; damaged and foreign entries are not executed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest

from flashmem.base.paths import TEMPLATES, VARIABLE
from flashmem.cli.commands.bundles import clear_cache
from flashmem.compiler.lowering import templates
from flashmem.compiler.lowering.template_cache import TemplateCache

Render = Callable[[], tuple[str, int]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / TEMPLATES


@pytest.fixture
def render(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Render:
    """Render a template as a new process would; its text, and how many templates were compiled for it."""
    compiled: list[str | None] = []
    compile_ = jinja2.Environment.compile

    def counted(environment: jinja2.Environment, source: str, name: str | None = None, *rest: str) -> object:
        compiled.append(name)
        return compile_(environment, source, name, *rest)  # type: ignore[call-overload]

    monkeypatch.setattr(jinja2.Environment, "compile", counted)
    environment = templates._environment.__wrapped__

    def rendered() -> tuple[str, int]:
        compiled.clear()
        text = environment(templates.DEFAULT_STYLE).get_template("common/prelude.cl.j2").render(text="FM_MAD(a, b, c)")
        return text, len(compiled)

    return rendered


def test_a_template_is_compiled_once(render: Render, folder: Path) -> None:
    text, count = render()
    assert "FM_MAD" in text and count > 0
    assert render() == (text, 0)
    [entry] = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, entry.stat().st_mode & 0o777) == (0o700, 0o600)
    clear_cache()
    assert not folder.exists()
    assert render() == (text, count)


def test_a_damaged_entry_is_written_again(render: Render, folder: Path) -> None:
    text, count = render()
    [entry] = folder.iterdir()
    content = bytearray(entry.read_bytes())
    for damaged in (content[: len(content) // 2], b"", content[:-1] + bytes([content[-1] ^ 1])):
        entry.write_bytes(damaged)
        assert render() == (text, count)
        assert entry.read_bytes() == content
    entry.unlink()
    os.mkfifo(entry)  # to read it would wait for ever
    assert render() == (text, count)
    assert entry.read_bytes() == content


def test_an_entry_of_another_user_or_in_a_link_is_not_executed(
    render: Render, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, count = render()
    [entry] = folder.iterdir()
    entry.rename(folder.parent / "elsewhere")
    entry.symlink_to(folder.parent / "elsewhere")
    assert render() == (text, count) and not entry.is_symlink()
    before = entry.read_bytes()
    entry.write_bytes(b"")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert render() == (text, count)
    assert entry.read_bytes() == b""
    monkeypatch.undo()
    assert before


def test_a_folder_that_cannot_be_written_costs_time_only(render: Render, folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file, where the folder should be")
    text, count = render()
    assert render() == (text, count) and count > 0


def test_other_options_have_other_entries(folder: Path) -> None:
    """Jinja's own checksum covers the text of a template alone."""
    for options in ({"trim_blocks": True}, {"trim_blocks": False}):
        environment = jinja2.Environment(
            loader=jinja2.DictLoader({"t": "{% if true %}\nx{% endif %}"}), bytecode_cache=TemplateCache(options), **options
        )
        assert environment.get_template("t").render() == ("x" if options["trim_blocks"] else "\nx")
    assert len(list(folder.iterdir())) == 2
