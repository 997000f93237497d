"""Standard streams and exit codes of a process: messages on stderr, one sentence and a code for each kind of error."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from flashmem.base import interrupts
from flashmem.base.errors import FlashmemWarning, RunError, UserError
from flashmem.base.extras import missing

EXIT_RUN_FAILED = 1
EXIT_USER_ERROR = 2


def say(message: str) -> None:
    """A line for the person who waits."""
    print(f"flashmem: {message}", file=sys.stderr)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turns errors into one sentence on stderr and an exit code: 2 if the user has to change something, 1 if the run failed.

    Anything else is a defect of flashmem and keeps its traceback.
    """
    try:
        try:
            yield
        finally:
            _flush()  # here, where a full disk and a reader who left can still be reported
    except (UserError, FileNotFoundError) as error:
        _fail(str(error), EXIT_USER_ERROR)
    except ModuleNotFoundError as error:
        said = missing("this command", error.name or "")
        if said is None:
            raise
        _fail(str(said), EXIT_USER_ERROR)
    except RunError as error:
        _fail(str(error), EXIT_RUN_FAILED)
    except BrokenPipeError:
        sys.exit(EXIT_RUN_FAILED)  # the reader of stdout left (`flashmem plan … | head`): nothing more to say to it
    except OSError as error:
        _fail(_describe(error), EXIT_USER_ERROR)
    except MemoryError:
        _fail("the process ran out of memory", EXIT_RUN_FAILED)
    except KeyboardInterrupt:
        if interrupts.is_silent():
            sys.exit(interrupts.EXIT_CODE)
        _fail("interrupted", interrupts.EXIT_CODE)


def prepare_streams() -> None:
    """Makes stdout and stderr fit for everything that is printed: file names of any bytes, and no reader at all.

    A stream that was closed before Python started becomes one that nobody reads, or the next file opened would take its place.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
    codecs.register_error(_ANY_TEXT, _encode_any)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ANY_TEXT)
    warnings.showwarning = _show_warning


_ANY_TEXT = "flashmem-any-text"


def _encode_any(error: UnicodeError) -> tuple[str | bytes, int]:
    """A file name's bytes as they are; what the terminal's encoding lacks as an escape."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("backslashreplace")(error)


_show_any_warning = warnings.showwarning


def _show_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    if issubclass(category, FlashmemWarning):
        say(str(message))
    else:
        _show_any_warning(message, category, *where, **more)


def _flush() -> None:
    """What cannot be written to stdout is forgotten, or Python would try again, and complain, as it shuts down."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise


def _describe(error: OSError) -> str:
    what = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        what = "no space left on the disk; free some or write elsewhere"
    return f"{error.filename}: {what}" if error.filename else what


def _fail(message: str, code: int) -> NoReturn:
    say(" ".join(message.split()))
    sys.exit(code)
