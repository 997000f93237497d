"""Checksums of weights while they are read, and files that are truncated while kernels read them."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from flashmem import Runtime
from flashmem.base.errors import RunError
from flashmem.base.types import TransferMode
from flashmem.bundle.checksums import ChecksummedRange, checksum
from flashmem.program.tensors import Slice
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.session import Session
from flashmem.runtime.streaming.ahead import Copy, Read
from flashmem.runtime.streaming.checked_table import CheckedTable
from flashmem.runtime.streaming.copied_ahead import AheadTransfer
from flashmem.runtime.streaming.weight_file import WeightFile
from flashmem.schedule.loads import Load, Segment
from tests.support.mini_bundle import MiniModel, write_mini_bundle

CASES = [
    (number, path, mode)
    for number, device in enumerate(list_devices())
    for path, modes in descriptor_for(device).modes.items()
    for mode in modes
]


@pytest.fixture
def model(tmp_path: Path) -> MiniModel:
    return write_mini_bundle(tmp_path / "m.flashmem")


def damage(model: MiniModel, offset: int) -> None:
    """Change one bit of the weight file."""
    with model.open().weights_path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("mode", ["map", "alias", "dma", "interleave"])
def test_a_runtime_checks_weights_as_a_session_does(mode: TransferMode, model: MiniModel) -> None:
    with Runtime(verify_weights=True) as runtime:
        opened = runtime.open(model.path, mode=mode)
        np.testing.assert_allclose(opened.run(None, model.inputs())[0], model.reference(model.inputs())[0], atol=2e-5)
    part = model.open().program.slices[-3]
    damage(model, part.offset + part.file_bytes - 1)
    with Runtime(verify_weights=True) as runtime:
        opened = runtime.open(model.path, mode=mode)
        with pytest.raises(RunError, match=rf"weights\.bin is damaged: slice '{part.name}' is not what was written; compile"):
            opened.run(None, model.inputs())
        assert runtime.held == 0


@pytest.mark.parametrize("strategy", ["auto", "preload"])
@pytest.mark.parametrize(("device", "path", "mode"), CASES)
def test_a_damaged_slice_ends_the_run_where_it_is_checked(
    device: int, path: str, mode: str, strategy: str, tmp_path: Path
) -> None:
    model = write_mini_bundle(tmp_path / "m.flashmem", path)  # type: ignore[arg-type]
    options = {"device": str(device), "mode": mode, "strategy": strategy, "verify_weights": True}
    with Session(model.path, **options) as session:  # type: ignore[arg-type]
        for _ in range(2):
            answers = session.run(None, model.inputs())
            np.testing.assert_allclose(answers[0], model.reference(model.inputs())[0], atol=1e-4)
    for part in (model.open().program.slices[0], model.open().program.slices[-3]):  # of W, and streamed
        damage(model, part.offset + part.file_bytes - 1)
        with (
            pytest.raises(RunError, match=rf"weights\.bin is damaged: slice '{part.name}' is not what was written; compile"),
            Session(model.path, **options) as session,  # type: ignore[arg-type]
        ):
            session.run(None, model.inputs())
        damage(model, part.offset + part.file_bytes - 1)  # restore the bit


def test_constants_are_always_checked(model: MiniModel) -> None:
    damage(model, model.open().program.constants_offset + 3)
    with pytest.raises(RunError, match="the part with the constants is not what was written"):
        Session(model.path)


def test_only_rows_that_are_read_are_checked(model: MiniModel) -> None:
    program = model.open().program
    (gather,) = program.host_embeddings
    damage(model, gather.offset + gather.row_stride * 3 - 1)  # the end of the third and last panel, in the second block
    first = {**model.inputs(), "tokens": np.zeros((1, 5), np.int64)}
    last = {**first, "tokens": np.full((1, 5), 69, np.int64)}
    with Session(model.path, verify_weights=True) as session:
        session.run(None, first)
        with pytest.raises(RunError, match="the table read by 'tokens' is not what was written"):
            session.run(None, last)
    with Session(model.path) as session:
        session.run(None, last)


def test_checked_blocks_are_put_together(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    (tmp_path / "weights.bin").write_bytes(content.tobytes())
    file = WeightFile(tmp_path / "weights.bin", 1000)
    blocks = [ChecksummedRange("the table", start, min(64, 990 - start)) for start in range(10, 990, 64)]
    values = tuple(checksum(content[block.offset : block.offset + block.nbytes].tobytes()) for block in blocks)
    table = CheckedTable(file, blocks, values)
    for offset, nbytes in ((10, 1), (10, 980), (73, 2), (74, 64), (500, 300), (989, 1)):
        data = np.empty(nbytes, np.uint8)
        table.read_into(data, offset)
        np.testing.assert_array_equal(data, content[offset : offset + nbytes])
    file.close()


def test_nobody_cuts_the_file_while_kernels_read_it(model: MiniModel) -> None:
    bundle = model.open()
    file = WeightFile(bundle.weights_path, bundle.program.weights_bytes)
    cut = f"import os; os.truncate({str(bundle.weights_path)!r}, 5000)"
    with file.guarded():
        file.check()
        with subprocess.Popen([sys.executable, "-c", cut]) as other:
            with pytest.raises(RunError, match=r"another process wants to write to .*weights"):
                for _ in range(1000):
                    time.sleep(0.01)
                    file.check()
            assert file.mapped[-1] >= 0  # would end this process if the file were truncated
            with file.guarded():  # nested, as opening and running may be
                pass
            assert other.poll() is None
            file._let_go()
            assert other.wait() == 0
        with pytest.raises(RunError, match=r"short read: .* ends before byte"):
            file.check()
    with pytest.raises(RunError, match=r"short read: .* ends before byte"), file.guarded():
        pass
    file.close()


def test_where_there_are_no_leases_the_size_is_checked(model: MiniModel, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def refused(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(22, "Invalid argument")
        return int(real(descriptor, command, argument))

    monkeypatch.setattr(fcntl, "fcntl", refused)
    bundle = model.open()
    file = WeightFile(bundle.weights_path, bundle.program.weights_bytes)
    with file.guarded():
        file.check()
        os.truncate(bundle.weights_path, 5000)
        with pytest.raises(RunError, match="short read"):
            file.check()
    file.close()


@pytest.mark.parametrize("device", range(len(list_devices())))
def test_a_run_in_place_checks_the_file_before_each_layer(
    device: int, model: MiniModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = []
    monkeypatch.setattr(WeightFile, "check", lambda self: checks.append(self._leased))
    with Session(model.path, device=str(device), mode="map") as session:
        session.run(None, model.inputs())
    assert checks == [True] * len(model.open().program.launches)


def test_a_load_that_was_stopped_is_checked_from_its_begin_the_next_time() -> None:
    compared, part = list[int](), Slice("w", "w", 0, 8)
    transfer = AheadTransfer.__new__(AheadTransfer)
    transfer.checksums, transfer.tier, transfer._sums = {"w": checksum(bytes(range(8)))}, None, {}
    transfer.file = SimpleNamespace(compare_checksum=lambda what, value, expected: compared.append(value - expected))  # type: ignore[assignment]
    load = Load(part, Segment(0, 8))
    first = Read(0, 4, [Copy(load, lambda *_: None, last=False)], 0)  # type: ignore[arg-type, return-value]
    second = Read(4, 4, [Copy(load, lambda *_: None)], 0, first=False)  # type: ignore[arg-type, return-value]
    for read, content in ((first, range(4)), (first, range(4)), (second, range(4, 8))):
        transfer.has_read(read, np.array(content, np.uint8), in_tier=False)
    assert compared == [0]
