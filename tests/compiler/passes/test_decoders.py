"""Decoder layers of language models as exporters write them: launches a layer, answers, and bits in every transfer mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import flashmem
from flashmem.runtime.opencl.devices import descriptor_for
from tests.conformance.test_models import QUICK_PLACES
from tests.support.compared import by_runtime
from tests.support.decoders import Decoder, llama, smollm2
from tests.support.gguf_models import SmallLlama
from tests.support.launches import families_of

LAUNCHES: dict[str, tuple[Callable[[int], Decoder], dict[str, int]]] = {
    "llama": (llama, {"matmul": 7, "reduce_rows": 2, "rotary": 2, "attention": 1}),
    # Earlier keys and values are copied before the new ones.
    "smollm2": (smollm2, {"matmul": 7, "reduce_rows": 2, "rotary": 2, "attention": 1, "movement": 4}),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_of_a_layer(name: str, tmp_path: Path) -> None:
    """Two norms, queries, keys and values, their positions, attention, and four products with their epilogues."""
    decoder, wanted = LAUNCHES[name]
    two, three = (Counter(families_of(decoder(layers).model(), tmp_path)) for layers in (2, 3))
    assert dict(three - two) == wanted


@pytest.mark.parametrize(
    ("device", "attention"),
    [("pocl", {"attention": 1}), ("nvidia", {"attention": 1, "join_chunks": 1}), ("adreno750", {"attention": 1})],
)
def test_a_layer_with_its_cache_on_the_device_is_nine_launches(device: str, attention: dict[str, int], tmp_path: Path) -> None:
    """Queries and keys are rotated, and new keys and values written where they are kept, by one launch; ten on NVIDIA.

    Of several tokens, the parts of rows that rotate are copied: ten, and eleven on NVIDIA.
    """
    model = SmallLlama(formats=("Q4_1",), inner=256).write(tmp_path / "m.gguf")
    bundle = flashmem.compile(model, tmp_path / "m.flashmem", device=device, build=False, max_length=128)
    layer = {"elementwise": 1, "matmul": 4, "reduce_rows": 2, "rotary_scatter": 1}
    for variant in bundle.variants:
        families = [launch.shape.family for launch in variant.program.launches]
        first, second = (at for at, family in enumerate(families) if family == "rotary_scatter")
        copies = {} if variant is bundle.variants[0] else {"movement": 1}
        assert dict(Counter(families[first:second])) == layer | attention | copies


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_every_mode_gives_the_same_bits(name: str, precision: Any, tmp_path: Path) -> None:
    decoder = LAUNCHES[name][0](1)
    model, feeds = decoder.model(), decoder.feeds()
    onnx.save(model, tmp_path / "m.onnx")
    wanted = by_runtime(model, feeds)
    device, path = QUICK_PLACES[0]
    bundle = flashmem.compile(
        tmp_path / "m.onnx", tmp_path / "m.flashmem", device=device.descriptor_name, memory_path=path, precision=precision,
        chunk="4KiB",
    )  # fmt: skip
    with flashmem.Session(bundle, device=device.descriptor_name, strategy="preload") as session:
        resident = session.run(None, feeds)
    for one, two in zip(resident, wanted, strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=(1e-4 if precision == "fp32" else 1e-2) * np.abs(two).max())
    for mode in descriptor_for(device).modes[path]:
        with flashmem.Session(bundle, device=device.descriptor_name, mode=mode) as session:
            assert all(np.array_equal(a, b) for a, b in zip(session.run(None, feeds), resident, strict=True)), mode
