"""The device program as data: its JSON, its sizes, the first and last layers, and the sections of its source."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmem.program.kernel_text import KERNEL_MARK, kernel_source, kernel_texts
from flashmem.program.lanes import lane_kind
from flashmem.program.launches import Arg, Joined, KernelShape, Launch, LaunchOrder, SteadyLaunch, first_and_last
from flashmem.program.program import Program, fixed_bytes, output_bytes, raw_bytes, scratch_bytes
from flashmem.program.tensors import HostEmbeddingLookup, Port, Slice, Tensor


def launch(name: str, *args: Arg) -> Launch:
    return Launch(
        name, "k", (64,), (64,), args, "reusable", ("MatMul", "Relu"), 10, 20, KernelShape("matmul", rows=3, k_block=8)
    )


def program(**changes: Any) -> Program:
    """Two launches, a table of integers, an input in float16 and an output in int64 that is stored as int32."""
    first = launch("a", Arg("tensor", "x"), Arg("slice", "w[0]"), Arg("int", 7))
    second = launch("b", Arg("tensor", "y"), Arg("slice", "w[1]"), Arg("slice", "t"))
    fields: dict[str, Any] = {
        "memory_path": "texture", "precision": "fp32",
        "inputs": (Port("in", (5, 3), "float16", "x"), Port("ids", (4,), "int64", None)),
        "outputs": (Port("out", (7, 2), "int64", "y", ready=2),),
        "tensors": (
            Tensor("x", (5, 3), "float32", 0, 124), Tensor("y", (7, 2), "int32", 128, 120),
            Tensor("e", (4, 6), "float32", 256, 160),
        ),
        "slices": (
            Slice("w[0]", "w", 0, 4096, raw=4000), Slice("w[1]", "w", 4096, 4096, raw=100),
            Slice("t", "t", 8192, 2048, width=64, height=2, row_pitch=1024, channel="half", raw=1000),
        ),
        "launches": (first, second),
        "host_embeddings": (HostEmbeddingLookup("ids", "e", 12288, 50, 6, 8, 1, "int8"),),
        "arena_bytes": 416, "constants_offset": 16384, "constants_bytes": 96, "weights_bytes": 20480,
        "status": "y", "build_options": ("-cl-fast-relaxed-math",), "order": LaunchOrder(9, 8, 8, "given"), "live_bytes": 400,
        "steady": (SteadyLaunch(1, 2, launch("both", Arg("slice", "w"))),), "joined": (Joined("w", ("w[0]", "w[1]")),),
    }  # fmt: skip
    return Program(**{**fields, **changes})


def test_json_keeps_every_field() -> None:
    made = program()
    assert Program.from_json(json.loads(json.dumps(made.to_json()))) == made
    for broken in ({"launches": [{}]}, {"slices": [{"name": "w"}]}, {"unknown": 1}):
        with pytest.raises((KeyError, TypeError)):
            Program.from_json({**json.loads(json.dumps(made.to_json())), **broken})


def test_sizes() -> None:
    made = program()
    assert raw_bytes(made) == 96 + 4000 + 100 + 1000 + 50 * 8
    assert output_bytes(made) == 7 * 2 * 8
    # The largest of: the output before its conversion, the converted input, 4 gathered rows of 6 floats with a read row.
    assert scratch_bytes(made) == max(14 * 4, 15 * 4, 4 * 6 * 4 + 6)
    assert scratch_bytes(program(host_embeddings=())) == 15 * 4
    assert fixed_bytes(made) == 416 + 96 + 7 * 2 * 8 + scratch_bytes(made)
    whole = made.readable()["w"]
    assert (whole.offset, whole.nbytes, whole.raw, whole.is_image) == (0, 8192, 4100, False)
    assert [part.file_bytes for part in made.slices] == [4096, 4096, 2 * 1024]


def test_lanes_copy_what_most_bytes_of_weights_are() -> None:
    image = Slice("a", "a", 0, 64, width=4, height=1, row_pitch=64, channel="uint8")
    assert lane_kind(program()) == "half"
    assert lane_kind(program(memory_path="buffer")) == "buffer"
    assert lane_kind(program(slices=(*program().slices, image))) == "half"
    assert lane_kind(program(slices=(*program().slices, *[image] * 33))) == "uint8"


names = st.sampled_from(["a", "b", "c", "d"])


@given(st.lists(st.lists(st.tuples(st.sampled_from(["tensor", "slice"]), names), max_size=4), max_size=9))
def test_first_and_last_layers(drawn: list[list[tuple[Any, str]]]) -> None:
    launches = [launch(str(at), *(Arg(kind, name) for kind, name in args)) for at, args in enumerate(drawn)]
    for kind in ("tensor", "slice"):
        found = first_and_last(launches, kind)  # type: ignore[arg-type]
        layers = {name: [at for at, args in enumerate(drawn, 1) if (kind, name) in args] for name in "abcd"}
        assert found == {name: (min(at), max(at)) for name, at in layers.items() if at}


lines = st.text(string.ascii_letters + string.punctuation + " \n", max_size=60).filter(lambda text: KERNEL_MARK not in text)


@given(st.dictionaries(st.text(string.ascii_lowercase, min_size=1, max_size=8), lines, max_size=5))
def test_sections_of_a_source(parts: dict[str, str]) -> None:
    found = kernel_texts(kernel_source(parts))
    assert {name: text.strip() for name, text in found.items()} == {name: text.strip() for name, text in parts.items()}
