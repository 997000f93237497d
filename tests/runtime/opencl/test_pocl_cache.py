"""PoCL's own cache: a writable folder with free space, because PoCL ends the process on a full disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashmem.base import paths
from flashmem.base.errors import RunError
from flashmem.runtime.opencl import pocl
from flashmem.runtime.opencl.context import Context
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.mini_bundle import write_mini_bundle

POCL = [device for device in list_devices() if device.compiles_at_launch]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system with 64 KB free."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        (folder / "taken").write_bytes(bytes(128 << 10))
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


_RUN = """
import sys
import numpy as np
from flashmem import Session
with Session(sys.argv[1], device="pocl") as session:
    np.savez(sys.argv[3], *session.run(None, dict(np.load(sys.argv[2]))))
"""


@pytest.mark.skipif(not POCL, reason="PoCL's cache")
@pytest.mark.parametrize("filled", ["the cache", "the cache and the temporary folder"])
def test_a_bundle_runs_where_the_disk_is_full(filled: str, full: Path, tmp_path: Path) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem")
    inputs = model.inputs()
    np.savez(tmp_path / "inputs.npz", **inputs)
    (tmp_path / "tmp").mkdir()
    temporary = tmp_path / "tmp" if filled == "the cache" else full
    gone = ("POCL_CACHE_DIR", "FLASHMEM_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in gone}
    environment |= {"XDG_CACHE_HOME": str(full / "cache"), "HOME": str(full), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", _RUN, str(model.path), str(tmp_path / "inputs.npz"), str(tmp_path / "y.npz")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "y.npz") as found:
        np.testing.assert_allclose(found["arr_0"], model.reference(inputs)[0], rtol=0, atol=2e-5)
    assert list((tmp_path / "tmp").iterdir()) == [], "nothing temporary stays"


def _free(monkeypatch: pytest.MonkeyPatch, free: dict[Path, int]) -> None:
    """Simulate a separate disk with so many free bytes for each of these folders."""
    statvfs = os.statvfs

    def told(folder: Any) -> Any:
        inside = [each for each in free if Path(folder).is_relative_to(each)]
        return SimpleNamespace(f_bavail=free[max(inside)], f_frsize=1) if inside else statvfs(folder)

    monkeypatch.setattr(os, "statvfs", told)


def test_the_first_folder_that_has_room_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, temporary, other = (tmp_path / name for name in ("home", "temporary", "other"))
    for folder in (home, temporary, other):
        folder.mkdir()
    monkeypatch.delenv(pocl.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(paths, "_TEMPORARY", (str(other),))
    monkeypatch.setattr(pocl, "_folder_in_use", None)
    much, little = pocl.ROOM_BYTES, pocl.ROOM_BYTES - 1
    for free, chosen in (((much, much, much), None), ((little, much, much), temporary), ((little, little, much), other)):
        _free(monkeypatch, dict(zip((home, temporary, other), free, strict=True)))
        with pocl.writable_pocl_cache() as folder:
            assert (folder and folder.parent) == chosen
            assert os.environ.get(pocl.VARIABLE) == (str(folder) if folder else None)
        pocl.check_room()
    assert list(home.iterdir()) == [], "looking leaves nothing"


@pytest.mark.skipif(not POCL, reason="PoCL's cache")
def test_a_disk_that_is_full_everywhere_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pocl, "_folder_in_use", tmp_path / "pocl")
    Context(POCL[0])
    _free(monkeypatch, {tmp_path: 1 << 20})
    with pytest.raises(RunError, match=r"^PoCL keeps compiled kernels in .*/pocl, where less than 64 MiB are free; free some"):
        Context(POCL[0])


def test_a_cache_of_another_user_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a home it is in /tmp, where anybody could have put code."""
    monkeypatch.delenv(pocl.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pocl, "_folder_in_use", None)
    (tmp_path / "pocl/kcache").mkdir(parents=True)
    with pocl.writable_pocl_cache() as folder:
        assert folder is None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pocl.writable_pocl_cache() as folder:
        assert folder is not None
    monkeypatch.setenv(pocl.VARIABLE, str(tmp_path / "pocl/kcache"))
    with pocl.writable_pocl_cache() as folder:
        assert folder is None, "this one the user has named"
