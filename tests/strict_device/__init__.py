"""A strict OpenCL device for tests: every call is held to the rules of OpenCL 1.2 to 3.0 and to the limits of a phone's driver.

It stands between a program and a real device (PoCL), at the two names through which the program calls OpenCL: pyopencl, and
the library itself (`calls.py`). It knows nothing of the program. What a driver may leave undefined is refused, at the call that
asks for it, with a `BrokenRuleError`; what a phone does not promise is taken away where that can be done: memory is mapped as a
copy that reaches the device when it is unmapped, what is read later is there only after a wait, and new memory holds NaNs.

- `profiles.py`: what drivers of four families report, each figure with its source.
- `rules.py`: memory objects, commands and their order, maps; no OpenCL. What is in flight is what no event, no `clFinish` and
  no blocking call has shown to be complete, whatever the real device has done meanwhile: a missing wait is found each time.
- `objects.py`, `programs.py`: stand-ins for pyopencl's objects.
- `calls.py`: stand-ins for pyopencl and the library.

Orders between threads of the host are not checked: what one thread knows to be complete, all are taken to know.
"""

from strict_device.calls import StrictOpenCL
from strict_device.commands import BrokenRuleError
from strict_device.library import StrictLibrary
from strict_device.profiles import PROFILES, Profile
from strict_device.rules import Rules

__all__ = ["PROFILES", "BrokenRuleError", "Profile", "Rules", "StrictLibrary", "StrictOpenCL"]
