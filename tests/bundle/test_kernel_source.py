"""Kernel source of a bundle: includes and text beyond OpenCL C are refused; flashmem's own kernels are accepted."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashmem.base.errors import BundleError
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.kernel_source import check_options, check_source
from flashmem.program.kernel_text import KERNEL_MARK
from tests.support.bundle_changes import files_of, fit, rewrite
from tests.support.mini_bundle import write_mini_bundle

REFUSED = {
    "plain": '#include "/etc/passwd"',
    "blanks": '  #  \t include\t"/etc/passwd"',
    "in angles": "#include </etc/passwd>",
    "next": "#include_next <x>",
    "import": '#import "/etc/passwd"',
    "embed": '#embed "/etc/passwd"',
    "behind a comment": '/**/ # /* x */ include "/etc/passwd"',
    "behind a comment of lines": '/*\n*/#include "/etc/passwd"',
    "line goes on": '#inc\\\nlude "/etc/passwd"',
    "line goes on behind #": '#\\\ninclude "/etc/passwd"',
    "line goes on with blanks": '#inc\\ \nlude "/etc/passwd"',
    "line goes on in a comment": '// x \\\n\n#include "/etc/passwd"',
    "trigraph": '??=include "/etc/passwd"',
    "trigraph that ends a line": "// x ??/\n#include </etc/passwd>",
    "digraph": '%:include "/etc/passwd"',
    "digraph that a trigraph ends": '%??/\n:include "/etc/passwd"',
    "by a macro": '#define FILE "/etc/passwd"\n#include FILE',
    "carriage returns": '//x\r#include "/etc/passwd"\r',
    "a zero byte": '\0#include "/etc/passwd"',
    "a quote that hides": "' /*\n#include </etc/passwd>\n*/ '",
    "double quotes that hide": '" /*\n#include </etc/passwd>\n*/ "',
    "a comment over two kernels": f'/*\n{KERNEL_MARK}next\n#include "/etc/passwd"\n*/',
    "a line over two kernels": f'// \\\n{KERNEL_MARK}next\n#include "/etc/passwd"',
    "a comment that does not end": "/* x",
    "pragma": "#pragma GCC poison x",
    "pragma that includes": '#pragma include_alias("a", "b")',
    "pragma operator": "_Pragma(GCC)",
    "line": '#line 1 "/etc/passwd"',
    "error": "#error x",
    "bare": "# 1",
    "has": "#if __has_include(</etc/passwd>)\n#endif",
    "has, in a macro": "#define X __has_include",
    "file": "int x = sizeof(__FILE__);",
    "base file": "int x = sizeof(__BASE_FILE__);",
    "date": "int x = sizeof(__DATE__ __TIME__);",
    "assembly": "void f() { asm(x); }",
    "assembly of GCC": "void f() { __asm__ volatile (x); }",
    "assembly, pasted": "#define P(x, y) x##y\nvoid f() { P(a, sm)(x); }",
    "assembly, pasted by a parameter": "#define P(lane_x, y) lane_x##y\nvoid f() { P(a, sm)(x); }",
    "assembly, pasted twice": "#define P(x, y) x##0##y\nvoid f() { P(a, sm)(x); }",
    "pasted by digraphs": "#define P(x, y) x%:%:y",
    "pasted over lines": "#define P(x, y) x#\\\n#y\nP(a, sm)(x)",
    "universal names": "\\u0061sm(x);",
}


OWN = f"""#define fm_shorten(x, U, F) as_##F(as_##U(x))
{KERNEL_MARK}k
__kernel void k(__global float* a) {{ a[get_global_id(0)] = 1; }}
"""


@pytest.mark.parametrize("how", REFUSED)
def test_kernels_that_read_files_are_refused(how: str) -> None:
    check_source(OWN)
    for text in (f"{REFUSED[how]}\n{OWN}", f"{OWN}\n{REFUSED[how]}\n"):
        with pytest.raises(BundleError, match=r"^the bundle's kernels hold .*, which flashmem never writes; compile the model"):
            check_source(text)


@pytest.mark.parametrize("where", ["kernels.cl", "kernels_lane.cl"])
def test_bundles_with_such_kernels_are_refused(where: str, tmp_path: Path) -> None:
    path = write_mini_bundle(tmp_path / "m.flashmem").path
    file = files_of(path) / where
    file.write_text(f'#include "/etc/passwd"\n{file.read_text()}')
    fit(path, where)
    with pytest.raises(BundleError, match=r"^the bundle's kernels hold '#include .*/etc/passwd.*', which flashmem never"):
        Bundle.open(path)


OPTIONS = ["-I/etc", "-include /etc/passwd", "-DX=1", "@/etc/passwd", "-cl-std=CLC++", "-w", "", "-cl-a b"]


@pytest.mark.parametrize("option", OPTIONS)
def test_options_that_are_not_of_opencl_are_refused(option: str, tmp_path: Path) -> None:
    path = write_mini_bundle(tmp_path / "m.flashmem").path
    rewrite(path, "program.json", lambda program: program.update(build_options=[option]))
    with pytest.raises(BundleError, match=r"^the bundle compiles its kernels with .*, which flashmem never does; compile"):
        Bundle.open(path)
    check_options(["-cl-std=CL1.2", "-cl-fast-relaxed-math"])


def test_what_flashmem_writes_is_not_refused() -> None:
    check_source(
        f"""// it's a comment: "#include", /* not ended, asm, ??
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define fm_shorten(x, U, F) as_##F(as_##U(x))
#define LANE_OF(each) (lane_move < 2 ? each##0 : each##1)
#define LANE_READ(v) {{ \\
    lane_raw##v = 1; }}
{KERNEL_MARK}k
/* asm
#include "x"
*/
#if defined(cl_khr_subgroups) && __OPENCL_C_VERSION__ >= 200
#elif 1
#else
#endif
#pragma unroll
    for (;;) plasma = 1;
"""
    )


PIECES = st.sampled_from(["%:", "#", "??=", "??/", "\\", "\n", "\n", "/*", "*/", "//", "\r", '"', "'", " ", "include", "x"])


@pytest.mark.skipif(shutil.which("cpp") is None, reason="no preprocessor is here")
@settings(deadline=None, max_examples=50)
@given(before=st.lists(PIECES, max_size=6), after=st.lists(PIECES, max_size=4))
def test_whatever_a_preprocessor_includes_is_refused(before: list[str], after: list[str]) -> None:
    """With and without trigraphs."""
    text = "".join([*before, "#include <nowhere>\n", *after, "\n"])
    for options in ((), ("-trigraphs",)):
        done = subprocess.run(["cpp", "-w", *options, "-"], input=text.encode(), capture_output=True, check=False)
        if b"nowhere: No such file" in done.stderr:
            with pytest.raises(BundleError):
                check_source(text)
