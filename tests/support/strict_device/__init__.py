"""Strict OpenCL device for tests: checks every call by the rules of OpenCL 1.2 to 3.0 and the limits of phone drivers.

It is a layer between a program and a real device (PoCL), at the two interfaces through which the program calls OpenCL:
pyopencl, and the library itself (`calls.py`). It does not depend on the program. Undefined behaviour is refused with a
`BrokenRuleError`, at the call that causes it. It also removes what a phone does not guarantee, where possible: memory is mapped
as a copy that reaches the device at the unmap, the result of a non-blocking read exists only after a wait, and new memory
contains NaNs.

- `profiles.py`: the properties that drivers of five families report, each figure with its source.
- `commands.py`, `rules.py`, `writers.py`, `sites.py`: memory objects, commands and their order, maps; no OpenCL. A command is
  in flight until an event, a `clFinish` or a blocking call shows that it is complete, whatever the real device has done
  meanwhile: a missing wait is always found.
- `overlap.py`: forces copies of several threads to be in flight at the same time.
- `registers.py`: what a kernel's text says of its registers, which limit its work-group.
- `objects.py`, `transfers.py`, `programs.py`: replacements of pyopencl's objects.
- `vendors.py`: imports of host memory (Arm) and recorded launches (Qualcomm).
- `dot_products.py`: built-in functions of Khronos' and Arm's extensions for dot products of bytes.
- `calls.py`, `library.py`: replacements of pyopencl and the library.

Two commands that use one memory object, one of them to write it, must be ordered: by their queue, by events, or by a wait of
the host. A vector clock with an entry for each queue, and one more for the host, checks the order. Host threads have no
separate clocks: a wait of one thread counts for all. The command is really complete then, and Python's lock orders
communication between threads, even without a lock that could be observed; separate clocks would report correct orders. The
price: two threads that each wait for their own copies are caught only if their copies overlap. So a copy that a thread waits
for stays in flight until another thread has enqueued one, or for some milliseconds. Threads whose copies may overlap are then
caught, though the real copies take microseconds, and nothing is reported that was not in flight.

`by_event` is stricter: a command that reads memory which another queue wrote must wait for an event of that queue, as the
specification requires of programs (appendix A.1); a wait of the host is not enough then. That is flashmem's own rule, so
`door.py` sets it.
"""

from tests.support.strict_device.calls import StrictOpenCL
from tests.support.strict_device.commands import BrokenRuleError
from tests.support.strict_device.library import StrictLibrary
from tests.support.strict_device.profiles import PROFILES, Profile
from tests.support.strict_device.rules import Rules

__all__ = ["PROFILES", "BrokenRuleError", "Profile", "Rules", "StrictLibrary", "StrictOpenCL"]
