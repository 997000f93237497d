"""Kernels for a driver whose code reads where no work-item asks.

llvmpipe runs a kernel for several work-items at once, and masks those that have left a loop or a branch. It does not mask a
read from an address that it knows to be the same for all of them. So a loop reads once more after its last turn, behind the
memory perhaps, which ends the process if nothing is mapped there (docs/research/opencl-notes.md). Here each pointer of a kernel
gets an offset that is zero, but which the compiler must take for different in each work-item: it is read from private memory.
All reads are masked then.
"""

from __future__ import annotations

from flashmem.program.kernel_text import KernelHead, code_of, kernel_heads, last_word

_OFFSET = " volatile int fm_private[2] = {0, 0}; const size_t fm_zero = fm_private[get_global_id(0) & 1];"


def with_masked_reads(text: str) -> str:
    """The kernels of `text` with an offset to each pointer, without comments."""
    code = code_of(text)
    parts = list[str]()
    done = 0
    for head in kernel_heads(code):
        body = code.find("{", head.end) + 1
        parts += [code[done:body], _moved(head)]
        done = body
    return "".join([*parts, code[done:]])


def _moved(head: KernelHead) -> str:
    """The statements at the begin of a kernel."""
    pointers = [last_word(each.rstrip()) for each in head.parameters.split(",") if "*" in each and "__local" not in each]
    return _OFFSET + "".join(f" {name} += fm_zero;" for name in pointers) if pointers else ""
