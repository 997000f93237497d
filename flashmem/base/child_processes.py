"""Python child processes: their command line, their environment, and their end when the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flashmem.base.errors import RunError, UserError

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter; start it with `module_environment`.

    `-P` keeps the current folder out of `sys.path`, so that a file there named numpy.py is not run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for `python_module`: the child has the import paths of this process, including this package."""
    here = str(Path(__file__).resolve().parents[2])
    folders = [folder for folder in sys.path if folder]  # "" is the current folder
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*folders, here]))}


@contextmanager
def ending_in_a_sentence() -> Iterator[None]:
    """An error of flashmem in the body ends this child process with its sentence as the last line, which the parent shows."""
    try:
        yield
    except (UserError, RunError) as error:
        sys.exit(str(error))


def end_with(parent: int) -> bool:
    """Have the system kill this child process when its parent ends. Only Linux can do that.

    `parent` is the parent's process id. Linux acts when the *thread* that started the child ends.

    Returns:
        False where the parent has ended already.
    """
    if sys.platform in ("linux", "android"):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL))
    return os.getppid() == parent
