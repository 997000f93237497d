"""Child processes of Python: what they import from, and how they end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter, to be given `module_environment`.

    `-P`: Python would put the current folder first, and a file there that is called numpy.py would be run.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`environment` for `python_module`: the child finds modules where this process does, this package among them."""
    here = str(Path(__file__).resolve().parents[2])
    folders = [folder for folder in sys.path if folder]  # an empty one is the current folder
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*folders, here]))}


def end_with(parent: int) -> bool:
    """For a child process: the system ends it when its parent does, whatever it is doing then. Only Linux can do that.

    Linux takes the end of the *thread* that started the child for that of the parent. `parent` is the parent's process id.

    Returns:
        False where the parent has ended already.
    """
    if sys.platform in ("linux", "android"):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL))
    return os.getppid() == parent
