"""Bounds of kernels: arguments are compared with the memory that the kernel text says it accesses."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import flashmem
from flashmem.base.errors import BundleError
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.kernel_bounds import check_bounds, parsed_kernels
from flashmem.bundle.kernel_source import check_source
from flashmem.program.launches import Arg, Launch
from flashmem.program.program import Program
from flashmem.program.tensors import Tensor
from tests.support.bundle_changes import files_of, rewrite
from tests.support.paths import DATA, ROOT

MODELS = ("gptneo-tiny", "mobilenet-tiny", "resnet-tiny")
KERNEL = """
static inline float4 k_epilogue(float4 v0, const int row, const int col, __global const float* e0, __global const float* e1) {
    const float4 x0 = vload4(0, e0 + (row % 3) * 8 + col);
    const float4 x1 = (float4)(e1[row]);
    return v0 + x0 + x1;
}
//@ items (columns + 3) / 4, rows
//@ zero first
//@ row < rows
//@ col < columns
//@ require rows <= 100
//@ y[row * columns + col]
__kernel __attribute__((reqd_work_group_size(2, 1, 1)))
void k(__global float* restrict y, __global const float* restrict e0, __global const float* restrict e1,
       const int rows, const int columns, const int first) {}
"""


def program(rows: int, columns: int, first: int, size: tuple[int, ...], y: int, e0: int, e1: int) -> Program:
    """One launch of KERNEL with buffers of the given numbers of floats."""
    sizes = {"y": y, "e0": e0, "e1": e1}
    tensors = tuple(Tensor(name, (n,), "float32", i << 20, 4 * n) for i, (name, n) in enumerate(sizes.items()))
    args = (*(Arg("tensor", tensor.name) for tensor in tensors), *(Arg("int", n) for n in (rows, columns, first)))
    launch = Launch("it", "k", size, (2, 1), args, "elemental", (), 0, 0)
    return Program("buffer", "fp32", (), (), tensors, (), (launch,), (), 0, 0, 0, 0)


def test_what_fits_exactly_is_taken() -> None:
    check_bounds(program(10, 8, 0, (2, 10), 80, 27, 10), KERNEL)
    check_bounds(program(2, 8, 5, (2, 2), 16, 19, 2), KERNEL)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((10, 8, 0, (2, 10), 79, 27, 10), "leaves the memory of 'y'"),
        ((10, 8, 0, (2, 10), 80, 26, 10), "leaves the memory of 'e0'"),
        ((10, 8, 0, (2, 10), 80, 27, 9), "leaves the memory of 'e1'"),
        ((11, 8, 0, (2, 11), 80, 27, 10), "leaves the memory of"),
        ((101, 8, 0, (2, 101), 8000, 8000, 8000), "needs rows <= 100"),
        ((10, 8, 0, (2, 11), 80, 27, 10), "work-items, not those of its kernel"),
        ((10, 8, 0, (4, 10), 80, 27, 10), "work-items, not those of its kernel"),
        ((10, 8, 0, (2,), 80, 27, 10), "work-items, not those of its kernel"),
        ((0, 8, 0, (2, 0), 80, 27, 10), "gives 0 for 'rows'"),
        ((10, 8, -1, (2, 10), 80, 27, 10), "gives -1 for 'first'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(numbers: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BundleError, match=f"{message}.*; compile the model again$"):
        check_bounds(program(*numbers), KERNEL)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("//@ y[row * columns + col]\n", "", "does not state what it touches of 'y'"),
        ("//@ items (columns + 3) / 4, rows\n", "", "states no work-items"),
        ("//@ row < rows\n", "", "states no bounds"),
        ("y[row * columns + col]", "y[row * other]", "states no bounds"),
        ("y[row * columns + col]", "y[row ** columns]", "a kernel states 'row \\*\\* columns'"),
        ("y[row * columns + col]", "y[__import__(1)]", "a kernel states"),
        ("y[row * columns + col]", "y[row / (first - 1)]", "a division of negative numbers or by zero"),
        ("//@ zero first", "//@ hope", "a kernel states 'hope'"),
        ("void k(", "void other(", "runs the kernel k, which its kernels lack"),
        (", const int first", "", "another number of arguments"),
        ("const int first", "const float first", "gives a int for 'first'"),
    ],
)
def test_a_kernel_says_all_of_it(old: str, new: str, message: str) -> None:
    assert old in KERNEL
    with pytest.raises(BundleError, match=message):
        check_bounds(program(10, 8, 0, (2, 10), 80, 27, 10), KERNEL.replace(old, new))


@pytest.fixture
def no_end() -> Iterator[None]:
    """Fail instead of reading for hours."""

    def stop(*_: object) -> None:
        raise AssertionError("it does not end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


BAD = [
    "(" * 3000 + "rows" + ")" * 3000, "-" * 3000 + "rows", "rows" + " + 0" * 3000, "rows" + " + 0" * 300,
    "(" * 300 + "rows" + ")" * 300, "-" * 150 + "rows", "9" * 5000, "rows ** 9", "rows if rows else 1", "rows\\", "rows < 1",
    "min(rows)", "0x1for x in y", "1_0", "", "é", "'a'",
]  # fmt: skip


def test_statements_that_are_no_expressions_are_refused_in_a_sentence() -> None:
    for text in BAD:
        kernel = KERNEL.replace("//@ row < rows", f"//@ row < {text}")
        with pytest.raises(BundleError, match=r"^the bundle is damaged: a kernel states .{1,140}; compile the model again$"):
            check_bounds(program(10, 8, 0, (2, 10), 80, 27, 10), kernel)


def test_numbers_of_statements_do_not_grow_without_end(no_end: None) -> None:
    """Each of the lines squares the number before: the last one would have a billion digits."""
    squares = "".join(f"//@ i{n + 1} < {' * '.join([f'i{n}'] * 20)}\n" for n in range(7))
    kernel = KERNEL.replace("//@ row < rows\n", f"//@ row < rows\n//@ i0 < 1000000\n{squares}")
    with pytest.raises(BundleError, match=r"states no bounds \(a number of more than 128 bits\); compile the"):
        check_bounds(program(10, 8, 0, (2, 10), 80, 27, 10), kernel)


def test_kernels_are_limited() -> None:
    for old, new, message in (
        ("const int first)", f"{', '.join(f'const int n{n}' for n in range(600))})", "kernel k has 605 parameters"),
        ("//@ row < rows\n", "//@ row < rows\n" * 2000, "kernel k states 2005 facts"),
        ("    const float4 x0", "    e0[0], " * 2000 + "const float4 x0", "kernel k has too many reads"),
        ("(row % 3) * 8", f"(row {' ' * 3000} % 3) * 8", "a kernel reads at .*, which does not end"),
        ("vload4(0, e0 + (row % 3) * 8 + col);", "vload4(0, e0 + (row % 3;", "a kernel reads at .*, which does not end"),
        ("__kernel ", "__kernel /* void k(int a) */ ", "kernel k has a comment in its declaration"),
    ):
        assert old in KERNEL
        with pytest.raises(BundleError, match=f"^the bundle is damaged: {message}; compile the model again$"):
            check_bounds(program(10, 8, 0, (2, 10), 80, 27, 10), KERNEL.replace(old, new))


def test_reading_ends_for_whatever_a_text_holds(no_end: None) -> None:
    """The text of a stranger is read in one pass: a search that begins again at each word would take hours for these."""
    many = 20_000
    blanks, word = " " * 10 * many, "a" * 10 * many
    texts = [
        "/*" * many, "//" * many, "__kernel " * many, "__kernel void " * many, "__kernel void a(" * many,
        "__kernel void" + blanks, "__kernel " + word, "void a(" * many, "#define A x ## 0 " + word,
        "#define A x ## 0 " + blanks, "## " * many,
        "k_prologue(" * many, word + "_prologue", "e0[" * many, "vload4(0, e0 + (" * many, "//@ " + "(" * many, "//@\n" * many,
        "#" + blanks, "#define " + word, "a_epilogue(){\n}" * many, "__has_" * many,
    ]  # fmt: skip
    for text in texts:
        for whole in (f"{text}\n{KERNEL}", KERNEL.replace("const float4 x0", f"{text}\nconst float4 x0")):
            for read in (check_source, parsed_kernels):
                with suppress(BundleError):
                    read(whole)


def _moved(whole: Program, offset: int) -> Program:
    """`whole` with e0 at `offset`: y uses the bytes from 0 to 320."""
    y, e0, e1 = whole.tensors
    return replace(whole, tensors=(y, replace(e0, offset=offset, nbytes=448), e1))


@pytest.mark.parametrize("offset", [0, 64, 319])
def test_what_is_written_is_no_other_tensors(offset: int) -> None:
    with pytest.raises(BundleError, match="writes 'y' over 'e0'"):
        check_bounds(_moved(program(10, 8, 0, (2, 10), 80, 80, 10), offset), KERNEL)


def test_slack_is_read_only() -> None:
    whole = program(10, 8, 0, (2, 10), 80, 27, 10)
    check_bounds(_moved(whole, 320), KERNEL)
    y, *others = whole.tensors
    with pytest.raises(BundleError, match="leaves the memory of 'y'"):
        check_bounds(replace(whole, tensors=(replace(y, shape=(79,), nbytes=448), *others)), KERNEL)


def test_a_kernel_says_what_it_writes_over() -> None:
    whole = program(10, 8, 0, (2, 10), 80, 80, 10)
    (launch,) = whole.launches
    y, e0, *numbers = launch.args
    twice = replace(whole, launches=(replace(launch, args=(y, y, *numbers)),))
    with pytest.raises(BundleError, match="writes 'y' over 'e0'"):
        check_bounds(twice, KERNEL)
    states = KERNEL.replace("//@ zero first", "//@ zero first\n//@ over e0")
    check_bounds(twice, states)
    with pytest.raises(BundleError, match="writes 'y' over 'e0'"):  # it may be the same tensor, not an overlapping one
        check_bounds(_moved(whole, 0), states)
    with pytest.raises(BundleError, match="writes 'y' over 'e1'"):
        check_bounds(replace(whole, launches=(replace(launch, args=(y, e0, y, *numbers[1:])),)), states)


def test_only_tensors_are_written() -> None:
    whole = program(10, 8, 0, (2, 10), 80, 27, 10)
    (launch,) = whole.launches
    args = (Arg("constant", 0, 320), *launch.args[1:])
    changed = Launch("it", "k", launch.global_size, launch.local_size, args, "elemental", (), 0, 0)
    with pytest.raises(BundleError, match="gives a constant for 'y'"):
        check_bounds(Program("buffer", "fp32", (), (), whole.tensors, (), (changed,), (), 0, 0, 0, 0), KERNEL)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("bounds")
    return {
        (name, path): flashmem.compile(
            DATA / f"{name}.onnx", folder / f"{name}-{path}.flashmem", memory_path=path, chunk="4KiB"
        ).path
        for name, path in zip(MODELS, ("buffer", "buffer", "texture"), strict=True)
    }  # type: ignore[misc]


@pytest.mark.parametrize("name", MODELS)
def test_numbers_of_real_kernels_cannot_grow(name: str, compiled: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    (source,) = (path for (model, _), path in compiled.items() if model == name)
    bundle = Bundle.open(source)
    grown = 0
    for launch in bundle.program.launches:
        for at, arg in enumerate(launch.args):
            if arg.kind != "int":
                continue
            value = int(arg.value)
            for other in (value * 4096 + 4096, 2**31 - 1, -1):
                try:
                    check_bounds(_alone(bundle.program, launch, at, other), _kernel_text(bundle.source.plain, launch.kernel))
                except BundleError:
                    grown += 1
                else:  # a number that only selects a position inside the memory
                    assert _is_harmless(bundle, launch, at), (launch, at, other)
    assert grown > 3 * len(bundle.program.launches)


HARMLESS = {
    "stride_d", "stride_h", "stride_w", "dilation_d", "dilation_h", "dilation_w", "pad_front", "pad_top", "pad_left",
    "pad_back", "pad_bottom", "pad_right", "fold_rows", "fold_texels", "since", "until",
}  # fmt: skip
"""Taps outside the image are not read, wherever they are, nor texels outside a texture, nor keys outside the memory."""


def _is_harmless(bundle: Bundle, launch: Launch, at: int) -> bool:
    """Whether argument `at` only selects a position inside the memory, or is not used."""
    names = _parameters(bundle, launch.kernel)
    name, text = names[at], _kernel_text(bundle.source.plain, launch.kernel)
    if name in HARMLESS or re.search(rf"[/%] {name}\b", text):  # a larger divisor gives a smaller result
        return True
    if re.fullmatch(r"[st]\d", name):  # the stride of a dimension of size 1
        return launch.args[names.index(f"n{name[1]}")].value == 1
    return name == "m0" and "m1" not in names  # the size of the only dimension of stacks


@cache
def _kernel_text(plain: str, kernel: str) -> str:
    """The text of one kernel: its statements, its body and its epilogue."""
    start = plain.rfind("\n}", 0, plain.find(f"{kernel}"))
    return plain[max(start, 0) : plain.find("\n}\n", plain.find(f"void {kernel}(")) + 3]


def _parameters(bundle: Bundle, kernel: str) -> list[str]:
    match = re.search(rf"void {kernel}\(([^)]*)\)", bundle.source.plain)
    assert match is not None
    return [parameter.split()[-1] for parameter in match[1].split(",")]


def _alone(program: Program, launch: Launch, at: int, value: int) -> Program:
    """The program with this launch only, and another number in it."""
    args = (*launch.args[:at], Arg("int", value), *launch.args[at + 1 :])
    return replace(program, launches=(replace(launch, args=args),))


def test_a_rewritten_program_is_refused_on_opening(compiled: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    for source in compiled.values():
        shutil.copytree(source, tmp_path / source.name)

        def change(data: Any) -> None:
            last = data["launches"][-1]
            next(arg for arg in last["args"] if arg["kind"] == "int")["value"] = 2**31 - 1

        rewrite(tmp_path / source.name, "program.json", change)
        with pytest.raises(BundleError, match="compile the model again"):
            Bundle.open(tmp_path / source.name)
        assert files_of(tmp_path / source.name).is_dir()


def test_every_template_states_its_bounds() -> None:
    templates = {path.name: path.read_text() for path in (ROOT / "kernels/templates").rglob("*.j2")}
    kernels = {name: text for name, text in templates.items() if "__kernel" in text and "void" in text}
    del kernels["lane_copy.cl.j2"]  # the runtime's own: no program launches it
    assert len(kernels) > 20
    for name, text in kernels.items():
        assert "//@ items" in text, name
