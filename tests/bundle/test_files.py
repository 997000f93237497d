"""Files of foreign bundles and of caches: only regular files of bounded size, of one bundle, of one user."""

from __future__ import annotations

import os
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flashmem import Session
from flashmem.base import files, paths
from flashmem.base.errors import BundleError, FlashmemWarning, UserError
from flashmem.base.files import read_cached, written_whole
from flashmem.base.paths import make_private
from flashmem.base.units import format_size
from flashmem.bundle import cache as bundle_cache
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.manifest import BINARIES, variant_files
from flashmem.bundle.replacing import _link_or_copy, replace_binaries, replace_plan
from flashmem.bundle.version_directories import current_version
from flashmem.cli.commands.bundles import check_bundle, clear_cache, list_cache
from flashmem.runtime.kernels import cache_files as program_files
from flashmem.runtime.kernels.cache_files import ProgramCache, packed_entries, unpacked_entries
from flashmem.runtime.streaming.weight_file import WeightFile
from tests.support.bundle_changes import files_of, rewrite
from tests.support.mini_bundle import MiniModel, write_mini_bundle

FILES = ("manifest.json", *variant_files(0), "weights.bin")


@pytest.fixture
def model(tmp_path: Path) -> MiniModel:
    return write_mini_bundle(tmp_path / "m.flashmem")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Fail instead of waiting for ever, as when opening a pipe without a writer."""

    def stop(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def place(bundle: Path, name: str) -> Path:
    return bundle / name if name == "manifest.json" else files_of(bundle) / name


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link"])
def test_a_file_that_is_none_is_refused_at_once(kind: str, name: str, model: MiniModel, no_waiting: None) -> None:
    file = place(model.path, name)
    content = file.read_bytes()
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "link":
        (model.path.parent / "elsewhere").write_bytes(content)
        file.symlink_to(model.path.parent / "elsewhere")
    else:
        file.symlink_to("/dev/zero")
        if os.geteuid() == 0:
            file.unlink()
            os.mknod(file, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero, which is endless
    with pytest.raises(BundleError, match=rf"{name}.*(is no regular file|is a link).*; compile the model again"):
        check_bundle(model.path, as_json=False)
    assert name != "manifest.json" or kind == "link" or current_version(model.path) is None


def test_a_file_that_is_too_large_is_not_read(model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file, which needs no space at the sender."""
    with (model.path / "manifest.json").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleError, match=r"manifest\.json cannot be read \(it is larger than 67108864 bytes\)"):
        Bundle.open(model.path)


@pytest.mark.parametrize("name", variant_files(0))
def test_a_part_that_is_too_large_is_not_read(name: str, model: MiniModel) -> None:
    file = place(model.path, name)
    with file.open("ab") as opened:
        opened.truncate(1 << 40)
    rewrite(model.path, "manifest.json", lambda manifest: manifest["files"][name].update(nbytes=1 << 40))
    with pytest.raises(BundleError, match=rf"has no readable {name} \(it is larger than"):
        Bundle.open(model.path)


def test_a_version_folder_that_is_a_link_is_refused(model: MiniModel, tmp_path: Path) -> None:
    files_of(model.path).rename(tmp_path / "elsewhere")
    files_of(model.path).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match=rf"its folder {files_of(model.path).name} is a link; compile the model again"):
        Bundle.open(model.path)


def test_a_bundle_may_itself_be_a_link(model: MiniModel, tmp_path: Path) -> None:
    (tmp_path / "other.flashmem").symlink_to(model.path)
    Bundle.open(tmp_path / "other.flashmem").verify_weights()


def test_weights_are_not_followed_once_the_bundle_is_open(model: MiniModel, tmp_path: Path, no_waiting: None) -> None:
    bundle = model.open()
    bundle.weights_path.rename(tmp_path / "elsewhere")
    bundle.weights_path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="it is a link"):
        WeightFile(bundle.weights_path, bundle.program.weights_bytes)
    with pytest.raises(BundleError, match="it is a link"):
        bundle.verify_weights()
    bundle.weights_path.unlink()
    os.mkfifo(bundle.weights_path)
    with pytest.raises(BundleError, match="it is no regular file"):
        WeightFile(bundle.weights_path, bundle.program.weights_bytes)


def test_binaries_that_are_no_file_are_left_out(model: MiniModel, no_waiting: None) -> None:
    bundle = replace_binaries(model.open(), packed_entries({"ab" * 32: b"binary"}))
    (bundle.files / BINARIES).unlink()
    os.mkfifo(bundle.files / BINARIES)
    assert Bundle.open(model.path).binaries is None


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o177])
def test_caches_are_their_users_alone_whatever_the_umask_is(umask: int, cache: Path, model: MiniModel) -> None:
    if umask == 0o022:  # as an older version wrote them
        (cache / "programs").mkdir(parents=True, mode=0o755)
    before = os.umask(umask)
    try:
        ProgramCache().write("ab" * 32, b"binary")
        if umask != 0o177:  # a bundle is written with folders that nobody may enter
            bundle_cache.find_or_make("kept", lambda path: write_mini_bundle(path).open())
    finally:
        os.umask(before)
    made = [path for path in (cache / "programs", cache / "bundles") if path.exists()]
    found = [path for folder in made for path in (folder, *folder.rglob("*"))]
    assert len(found) > (8 if umask != 0o177 else 1)
    wrong = {
        path: oct(path.stat().st_mode) for path in found if path.stat().st_mode & 0o777 != (0o700 if path.is_dir() else 0o600)
    }
    assert not wrong


def test_a_cache_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch, model: MiniModel) -> None:
    programs = ProgramCache()
    programs.write("ab" * 32, b"binary")
    make_private(cache / "bundles")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert programs.read("ab" * 32) is None and not programs.holds("ab" * 32)
    with pytest.warns(FlashmemWarning, match=r"the program cache .* cannot be written \(another user owns it\), so kernels"):
        programs.write("cd" * 32, b"binary")
    with pytest.warns(FlashmemWarning, match="the bundle cache .* belongs to another user, so the bundle is removed when"):
        assert not bundle_cache.place("m").is_relative_to(cache)
    programs.trim()
    programs.delete("ab" * 32)
    assert programs.clear() == programs.size() == (0, 0)
    monkeypatch.undo()
    monkeypatch.setenv("FLASHMEM_CACHE_DIR", str(cache))
    assert [path.name for path in (cache / "programs").iterdir()] == [f"{'ab' * 32}.bin"]


def own_and_foreign(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let every file and folder called `name` belong to another user."""
    for module in (bundle_cache, paths, files):
        monkeypatch.setattr(module, "is_foreign", lambda path: path.name == name)


def test_a_bundle_in_the_cache_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = bundle_cache.find_or_make("m", lambda path: write_mini_bundle(path).open())
    assert bundle_cache.find("m", lambda bundle: True) is not None and len(bundle_cache.entries()) == 1
    own_and_foreign(monkeypatch, "bundles")
    assert bundle_cache.find("m", lambda bundle: True) is None
    bundle_cache.forget(own.files)
    assert bundle_cache.entries() == [] and bundle_cache.clear() == ([], [])
    Bundle.open(own.path)
    with pytest.warns(FlashmemWarning, match="belongs to another user"):
        made = bundle_cache.find_or_make("m", lambda path: write_mini_bundle(path).open())
    assert made.path != own.path


@pytest.mark.parametrize("foreign", ["m.flashmem", "manifest.json", "version", "link"])
def test_a_bundle_of_another_user_in_the_own_cache_is_replaced(
    foreign: str, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = bundle_cache.find_or_make("m", lambda path: write_mini_bundle(path).open())
    if foreign == "link":
        own.path.rename(tmp_path / "elsewhere")
        own.path.symlink_to(tmp_path / "elsewhere")
    own_and_foreign(monkeypatch, own.files.name if foreign == "version" else foreign)
    assert bundle_cache.find("m", lambda bundle: True) is None
    bundle_cache.forget(own.files)
    assert (own.path / "manifest.json").stat().st_size > 0
    made = bundle_cache.find_or_make("m", lambda path: own if path.exists() else write_mini_bundle(path).open())
    assert made.path == own.path and not own.path.is_symlink()
    assert made.files.name != own.files.name, "the folder of another user was removed first"


def test_files_of_other_users_in_caches_are_not_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cache keeps: kernels, templates, rates and the list of drivers are read by this function."""
    programs = ProgramCache()
    programs.write("ab" * 32, b"binary")
    for name in ("programs", f"{'ab' * 32}.bin"):
        assert read_cached(programs.folder / f"{'ab' * 32}.bin", 1000)
        with monkeypatch.context() as patch, pytest.raises(PermissionError, match="another user owns it"):
            own_and_foreign(patch, name)
            read_cached(programs.folder / f"{'ab' * 32}.bin", 1000)


def test_entries_of_the_program_cache_that_are_no_files_are_misses(cache: Path, no_waiting: None) -> None:
    programs = ProgramCache()
    programs.write("ab" * 32, b"binary")
    entry = cache / "programs" / f"{'ab' * 32}.bin"
    entry.unlink()
    os.mkfifo(entry)
    assert programs.read("ab" * 32) is None
    programs.write("ab" * 32, b"binary")
    entry.rename(cache / "elsewhere")
    entry.symlink_to(cache / "elsewhere")
    assert programs.read("ab" * 32) is None and not entry.is_symlink()


def test_the_program_cache_keeps_what_was_used_last(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_files, "LIMIT_BYTES", 3500)
    programs, keys = ProgramCache(), [f"{number:064x}" for number in range(5)]
    for age, key in enumerate(keys):
        programs.write(key, bytes(1000))
        used = time.time() - 86400 * (10 - age)
        os.utime(programs.folder / f"{key}.bin", (used, used))
    assert programs.read(keys[0]) is not None  # it was written first, and is now the most recently used
    left = programs.folder / ".abcdef-left"
    left.write_bytes(b"of a killed process")
    programs.trim()
    assert left.exists(), "its writer may be about to rename it"
    os.utime(left, (0, 0))
    programs.trim()
    assert not left.exists()
    assert sorted(path.stem for path in programs.folder.iterdir()) == sorted((keys[0], keys[3], keys[4]))
    assert programs.size()[0] == 3 and programs.size()[1] <= programs.limit() == 3500


def test_a_session_holds_the_program_cache_to_its_limit(model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_files, "LIMIT_BYTES", 1)
    for apart in (False, True):
        with Session(model.path, build_apart=apart) as session:
            answer = session.run(None, model.inputs())
        assert ProgramCache().size() == (0, 0)
        np.testing.assert_allclose(answer[0], model.reference(model.inputs())[0], rtol=0, atol=2e-5)


def test_clearing_the_cache_removes_compiled_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    programs = ProgramCache()
    programs.write("ab" * 32, bytes(1000))
    list_cache(as_json=False)
    size = format_size(programs.size()[1])
    said = f"\n1 compiled kernels, {size} of at most {format_size(programs.limit())}, in {programs.folder}\n"
    assert said in capsys.readouterr().out
    clear_cache()
    assert f"removed 1 compiled kernels, {size}\n" in capsys.readouterr().err
    assert programs.size() == (0, 0)


def test_entries_of_a_bundle_are_read_in_one_pass() -> None:
    """Five thousand entries take a tenth of a second, not minutes."""
    entries = {f"{number:064x}": bytes(10_000) for number in range(5000)}
    content = packed_entries(entries)
    begun = time.process_time()
    assert unpacked_entries(content) == entries
    assert time.process_time() - begun < 1.5


def test_a_manifest_that_names_other_files_is_refused(model: MiniModel) -> None:
    """Those would be copied under that name."""
    own = (model.path / "manifest.json").read_bytes()
    for name in ("../../.bashrc", "/etc/passwd", "notes", "", "weights.bin", "program.1.json", "kernels.x.cl", "manifest.json"):
        rewrite(model.path, "manifest.json", lambda manifest, name=name: manifest["files"].update({name: {"nbytes": 1}}))
        with pytest.raises(BundleError, match=rf"its manifest names the file '{name}', which no bundle has; compile the"):
            Bundle.open(model.path)
        (model.path / "manifest.json").write_bytes(own)
    Bundle.open(model.path)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_copy_of_a_bundle_follows_no_link_and_overwrites_nothing(
    has_links: bool, model: MiniModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_links:  # as from one file system to another
        monkeypatch.setattr(os, "link", lambda *_, **__: os.read(-1, 1))
    bundle = model.open()
    copy = replace_plan(bundle, bundle.plan, bundle.meta, tmp_path / "copy.flashmem")
    assert copy.weights_path.samefile(bundle.weights_path) is has_links
    copy.verify_weights()
    kernels = bundle.files / "kernels.cl"
    kernels.rename(tmp_path / "private")
    kernels.symlink_to(tmp_path / "private")
    with pytest.raises(BundleError, match=r"kernels\.cl cannot be copied \(it is a link\)"):
        replace_plan(bundle, bundle.plan, bundle.meta, tmp_path / "next.flashmem")
    other = tmp_path / "other"
    other.write_text("the user's own")
    with pytest.raises(FileExistsError):
        _link_or_copy(bundle.weights_path, other)
    assert other.read_text() == "the user's own" and not (tmp_path / "next.flashmem").exists()


def test_a_bundle_that_is_planned_again_replaces_bundles_only(model: MiniModel, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "weights.bin").write_text("the user's own")
    bundle = model.open()
    with pytest.raises(UserError, match="work exists and is not a bundle; remove it or name another output"):
        replace_plan(bundle, bundle.plan, bundle.meta, tmp_path / "work")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["weights.bin"]


def test_what_is_written_is_on_the_disk_before_it_gets_its_name(
    model: MiniModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power leaves a whole file, or none. The order of the calls is what can be tested."""
    synced: list[os.stat_result] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor)), fsync(descriptor)))
    with written_whole(tmp_path / "file") as file:
        file.write(b"x" * 100)
    assert os.path.samestat(synced[-1], (tmp_path / "file").stat()) and synced[-1].st_size == 100
    bundle = model.open()
    copy = replace_plan(bundle, bundle.plan, bundle.meta, tmp_path / "copy.flashmem")
    for path in copy.files.iterdir():
        assert any(os.path.samestat(each, path.stat()) for each in synced), path
