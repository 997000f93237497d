"""Parsing of sizes and shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmem.base.errors import UserError
from flashmem.base.units import format_size, parse_shape, parse_size

POWERS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


@given(number=st.integers(1, 10**6), unit=st.sampled_from(sorted(POWERS)), space=st.sampled_from(["", " ", "  "]))
def test_whole_numbers_with_a_unit(number: int, unit: str, space: str) -> None:
    assert parse_size(f"{number}{space}{unit}") == number * POWERS[unit]
    assert parse_size(f"{number}{unit.lower()}") == number * POWERS[unit]


@pytest.mark.parametrize(
    ("text", "size"),
    [("256MB", 256_000_000), ("64 MiB", 67_108_864), ("1.5GB", 1_500_000_000), ("0.5KiB", 512), ("4096", 4096)],
)
def test_sizes_written_out(text: str, size: int) -> None:
    assert parse_size(text) == size


@given(st.integers(1, 2**63))
def test_bytes_pass_through(size: int) -> None:
    assert parse_size(size) == size
    assert parse_size(str(size)) == pytest.approx(size, rel=1e-15)


@pytest.mark.parametrize(
    "text", ["0", "-1", "lots", "", "MB", "1 MB of it", "1e6", "0.4B", "1XB", "nan", "inf", "1,5GB", "٣MB x"]
)
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(UserError, match=r"budget .*(positive|more than 0)"):
        parse_size(text, what="budget")


@pytest.mark.parametrize("size", [0, -1])
def test_numbers_that_are_not_sizes(size: int) -> None:
    with pytest.raises(UserError, match="not a positive number of bytes"):
        parse_size(size)


@given(st.integers(1, 10**15))
def test_a_formatted_size_reads_back_within_its_rounding(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.005)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (999, "999B"), (1000, "1KB"), (1_234_567, "1.23MB"), (999_600, "1MB"), (2_500_000_000, "2.5GB")],
)
def test_formatted_sizes(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.text("abcxyz_.:/=", min_size=1).filter(lambda name: name != "="), st.lists(st.integers(1, 10**6), max_size=5))
def test_shapes_read_back(name: str, shape: list[int]) -> None:
    assert parse_shape(f"{name}={'x'.join(map(str, shape))}") == (name, tuple(shape))


@pytest.mark.parametrize("text", ["1x128", "=1x2", "x=1x", "x=1x-2", "x=ax3", "x=1 x 2", "x=1.5"])
def test_what_is_not_a_shape(text: str) -> None:
    with pytest.raises(UserError, match=r"name=1x3x224x224"):
        parse_shape(text)
