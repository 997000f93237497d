"""A strict OpenCL device for tests: every call is held to the rules of OpenCL 1.2 to 3.0 and to the limits of a phone's driver.

It stands between a program and a real device (PoCL), at the two names through which the program calls OpenCL: pyopencl, and
the library itself (`calls.py`). It knows nothing of the program. What a driver may leave undefined is refused, at the call that
asks for it, with a `BrokenRuleError`; what a phone does not promise is taken away where that can be done: memory is mapped as a
copy that reaches the device when it is unmapped, what is read later is there only after a wait, and new memory holds NaNs.

- `profiles.py`: what drivers of five families report, each figure with its source.
- `commands.py`, `rules.py`, `writers.py`, `sites.py`: memory objects, commands and their order, maps; no OpenCL. What is in
  flight is what no event, no `clFinish` and no blocking call has shown to be complete, whatever the real device has done
  meanwhile: a missing wait is found each time.
- `overlap.py`: copies of several threads that are in flight at the same time each time.
- `objects.py`, `transfers.py`, `programs.py`: stand-ins for pyopencl's objects.
- `calls.py`, `library.py`: stand-ins for pyopencl and the library.

Two commands that use one memory object, one of them to write it, must be ordered: by their queue, by events, or by a wait of
the host. That is a vector clock with an entry for each queue, and one more for what the host knows. Threads of the host have no
clocks of their own: what one has waited for counts as known to all. It is complete in fact, and Python's lock orders what
threads tell each other, also where they take no lock that could be watched; clocks for threads would report orders that are
right. The price is that two threads, each of which waits for its own copies, are caught only where their copies overlap. So a
copy that a thread waits for stays in flight until another thread has enqueued one, or for some milliseconds: threads whose
copies may overlap are caught, though the real copies take microseconds, and nothing is reported that was not in flight.

`by_event` asks for more: what reads memory that another queue wrote waits for an event of that queue, as the specification
tells programs to (appendix A.1); a wait of the host is not enough then. That is flashmem's own rule, so `door.py` has it.
"""

from tests.support.strict_device.calls import StrictOpenCL
from tests.support.strict_device.commands import BrokenRuleError
from tests.support.strict_device.library import StrictLibrary
from tests.support.strict_device.profiles import PROFILES, Profile
from tests.support.strict_device.rules import Rules

__all__ = ["PROFILES", "BrokenRuleError", "Profile", "Rules", "StrictLibrary", "StrictOpenCL"]
