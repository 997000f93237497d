"""The bundle cache: it repairs entries, keeps its limit, and never fails a run. Also `flashmem cache` and `flashmem check`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import flashmem
from flashmem.base.errors import RunError, UserError
from flashmem.base.units import format_size
from flashmem.bundle import cache as bundle_cache
from flashmem.bundle.bundle import Bundle
from flashmem.compilation import read_compilation
from flashmem.request.request import BundleRequest
from flashmem.runtime.session import Session
from tests.support.bundle_changes import files_of
from tests.support.command_line import Command, command_line
from tests.support.mini_bundle import write_mini_bundle
from tests.support.paths import DATA

MODEL = DATA / "resnet-tiny.onnx"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cached bundles."""
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHMEM_CACHE_LIMIT", raising=False)
    return tmp_path / "cache" / "bundles"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


def entry(cache: Path, name: str, used: float) -> Path:
    """A small bundle in the cache, last used at `used`."""
    path = write_mini_bundle(cache / f"{name}.flashmem").path
    os.utime(path / "manifest.json", (used, used))
    return path


def names() -> list[str]:
    return [entry.path.stem for entry in bundle_cache.entries()]


def made(path: Path) -> Bundle:
    return write_mini_bundle(path).open()


@pytest.mark.parametrize(
    "damage", ["program.json", "manifest.json", "weights.bin", "no manifest", "old format", "empty manifest"]
)
def test_a_damaged_bundle_is_compiled_again(damage: str, cache: Path) -> None:
    path = bundle_cache.find_or_make("m", made).path
    manifest = path / "manifest.json"
    if damage == "no manifest":
        manifest.unlink()
    elif damage == "empty manifest":
        manifest.write_bytes(b"")
    elif damage == "old format":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format_version": 1}))
    else:
        file = manifest if damage == "manifest.json" else files_of(path) / damage
        os.truncate(file, file.stat().st_size - 1)
    assert bundle_cache.find_or_make("m", made).path == path
    Bundle.open(path).verify_weights()
    again = bundle_cache.find_or_make("m", lambda path: pytest.fail("it was there"))
    assert again.files.name == files_of(path).name


def test_weights_found_damaged_in_a_run_are_compiled_again(cache: Path) -> None:
    model = write_mini_bundle(cache / "m.flashmem")
    with model.open().weights_path.open("r+b") as file:
        file.seek(model.open().program.slices[5].offset)
        file.write(b"\0\1\2\3")
    with (
        pytest.raises(RunError, match=r"slice 'w2\.1' is not what was written; compile the model again"),
        Session(model.path, verify_weights=True) as session,
    ):
        session.run(None, model.inputs())
    bundle_cache.find_or_make("m", made).verify_weights()


def test_a_bundle_elsewhere_is_not_touched_for_being_damaged(cache: Path, tmp_path: Path) -> None:
    path = write_mini_bundle(tmp_path / "m.flashmem").path
    bundle_cache.forget(files_of(path))
    Bundle.open(path)


def test_flashmem_compile_repairs_its_cache(cache: Path) -> None:
    first = flashmem.compile(MODEL)
    (first.files / "kernels.cl").write_text("damaged")
    second = flashmem.compile(MODEL)
    assert second.path == first.path and second.files != first.files


def test_a_model_is_compiled_again_when_one_of_its_files_changes(cache: Path, tmp_path: Path) -> None:
    model, data = (Path(shutil.copy(DATA / f"gptneo-tiny-external.onnx{end}", tmp_path)) for end in ("", ".data"))
    first = flashmem.compile(model)
    assert read_compilation(model, BundleRequest()).find() == first
    os.utime(data)
    assert read_compilation(model, BundleRequest()).find() is None
    second = flashmem.compile(model)
    assert second.path == first.path and second.files != first.files
    data.rename(tmp_path / "elsewhere")
    assert read_compilation(model, BundleRequest()).find() is None
    os.utime(model)
    assert read_compilation(model, BundleRequest()).name + ".flashmem" != first.path.name


def test_what_was_used_longest_ago_goes_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate("abcd"):
        entry(cache, name, 1000.0 + number)
    size = bundle_cache.entries()[0].nbytes
    monkeypatch.setenv("FLASHMEM_CACHE_LIMIT", str(3 * size + 10))
    bundle_cache.find_or_make("a", made)  # found: it is now the most recently used
    bundle_cache.find_or_make("e", made)
    assert names() == ["e", "a", "d"]


def test_what_a_session_has_open_stays(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = entry(cache, "held", 1000.0)
    entry(cache, "idle", 2000.0)
    monkeypatch.setenv("FLASHMEM_CACHE_LIMIT", "0")
    with Session(held):
        bundle_cache.find_or_make("new", made)
        assert names() == ["new", "held"]
        removed, kept = bundle_cache.clear()
        assert ([e.path.stem for e in removed], [e.path.stem for e in kept]) == (["new"], ["held"])
    bundle_cache.clear()
    assert names() == []


def test_the_limit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    free = shutil.disk_usage(cache)
    for left, expected in ((10**15, 10 * 1000**3), (50 * 1000**3, 5 * 1000**3)):
        usage = free._replace(free=left)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        assert bundle_cache.limit() == expected
    monkeypatch.setenv("FLASHMEM_CACHE_LIMIT", "2GB")
    assert bundle_cache.limit() == 2 * 1000**3
    monkeypatch.setenv("FLASHMEM_CACHE_LIMIT", "much")
    with pytest.raises(UserError, match="FLASHMEM_CACHE_LIMIT 'much' is not a size"):
        bundle_cache.find_or_make("m", lambda path: pytest.fail("refused before the work"))


def test_leftovers_of_killed_processes_go(cache: Path) -> None:
    (cache / ".gone.flashmem-0123456789abcdef" / "0123456789abcdef").mkdir(parents=True)
    bundle_cache.find_or_make("m", made)
    assert [path.name for path in cache.iterdir()] == ["m.flashmem"]


def test_without_a_cache_compile_keeps_the_bundle_for_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="the bundle cache .* cannot be written"):
        bundle = bundle_cache.find_or_make("m", made)
    assert Bundle.open(bundle.path).path.parent.parent != tmp_path


def test_without_a_cache_compile_wants_an_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "file"))
    compiled = command("compile", MODEL)
    assert compiled.code == 2 and "file/bundles cannot be written; name a bundle with -o" in compiled.err


def test_cache_lists_and_clears(cache: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    entry(cache, "mini-0", 1000.0)
    newer = entry(cache, "mini-1", 2000.0)
    monkeypatch.setenv("FLASHMEM_CACHE_LIMIT", "5GB")
    listed = command("cache", "--json").json
    assert (listed["folder"], listed["limit_bytes"]) == (str(cache), 5 * 1000**3)
    assert [bundle["path"] for bundle in listed["bundles"]] == [str(newer), str(cache / "mini-0.flashmem")]
    assert listed["bytes"] == sum(bundle["bytes"] for bundle in listed["bundles"]) > 0
    shown = command("cache").out
    assert "mini-1.flashmem" in shown and f"2 bundles, {format_size(listed['bytes'])} of at most 5GB, in {cache}" in shown
    with Session(newer):
        cleared = command("cache", "clear")
    assert "removed 1 bundles" in cleared.err and "kept mini-1.flashmem, which a session has open" in cleared.err
    assert names() == ["mini-1"]


def test_check_reads_all_of_a_bundle(tmp_path: Path, command: Command) -> None:
    path = write_mini_bundle(tmp_path / "m.flashmem").path
    assert command("check", path, "--json").json["ok"] is True
    weights = Bundle.open(path).weights_path
    with weights.open("r+b") as file:
        file.seek(Bundle.open(path).program.constants_offset + 7)
        file.write(b"\xff")
    checked = command("check", path)
    assert checked.code == 2
    assert f"{weights} is damaged: the part with the constants is not what was written" in checked.err
