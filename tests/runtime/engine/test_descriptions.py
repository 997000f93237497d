"""What sessions, models and bundles say of themselves, in the words of ONNX Runtime where it has them."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest

import flashmem
from tests.support.zoo_data import DATA


@pytest.mark.parametrize("name", ["gptneo-tiny", "resnet-tiny", "sam2-narrow-decoder", "whisper-tiny-decoder"])
def test_inputs_and_outputs_are_described_as_onnx_runtime_does(name: str, tmp_path: Path) -> None:
    reference = onnxruntime.InferenceSession(DATA / f"{name}.onnx")
    bundle = flashmem.compile(DATA / f"{name}.onnx", tmp_path / "m.flashmem", build=False)
    with flashmem.Session(bundle) as session, flashmem.Runtime() as runtime, runtime.open(bundle) as model:
        for ours in (session, model):
            assert ours.get_providers() == ["OpenCLExecutionProvider"]
            for mine, theirs in (
                (ours.get_inputs(), reference.get_inputs()),
                (ours.get_outputs(), reference.get_outputs()),
            ):
                assert [(port.name, port.type) for port in mine] == [(port.name, port.type) for port in theirs]
                for port, right in zip(mine, theirs, strict=True):
                    assert len(port.shape) == len(right.shape)
                    sizes = zip(port.shape, right.shape, strict=True)
                    assert all(size == known for size, known in sizes if isinstance(known, int))


def test_a_size_that_differs_between_variants_is_open(tmp_path: Path) -> None:
    shapes = [{"input_ids": (1, 8)}, {"input_ids": (1, 12)}]
    bundle = flashmem.compile(DATA / "gptneo-tiny-dynamic.onnx", tmp_path / "m.flashmem", shapes=shapes, build=False)
    with flashmem.Session(bundle) as session:
        [ids], [logits, *_] = session.get_inputs(), session.get_outputs()
        assert (ids.shape, ids.type) == ([1, None], "tensor(int64)")
        assert logits.shape[:2] == [1, None] and logits.shape[2] is not None and logits.type == "tensor(float)"


def test_each_says_what_it_is_in_one_line(tmp_path: Path) -> None:
    bundle = flashmem.compile(DATA / "gptneo-tiny.onnx", tmp_path / "m.flashmem", build=False, budget="64MB")
    name = bundle.descriptor.name
    assert (
        repr(bundle)
        == f"<Bundle {tmp_path / 'm.flashmem'} of gptneo-tiny for {name}: {_weights(bundle)} of weights, budget 64MB>"
    )
    session = flashmem.Session(bundle)
    where = f"{session.device.name}, mode {session.mode}"
    assert repr(session) == f"<Session of gptneo-tiny on {where}, budget 64MB, open>"
    with flashmem.Session(bundle, strategy="preload") as unlimited:
        assert "no budget" in repr(unlimited)
    session.close()
    assert repr(session).endswith("closed: close was called>")
    with flashmem.Runtime() as runtime:
        model = runtime.open(bundle)
        assert repr(model) == "<Model gptneo-tiny in a Runtime, open>"
        model.close()
        assert repr(model).startswith("<Model gptneo-tiny in a Runtime, closed: ")


def _weights(bundle: flashmem.Bundle) -> str:
    return f"{bundle.program.weights_bytes / 1000:.3g}KB"
