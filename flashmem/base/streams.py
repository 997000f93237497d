"""Standard streams and exit codes of a process: messages on stderr, one sentence and one code for each kind of error."""

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
    """Print a progress message to stderr."""
    print(f"flashmem: {message}", file=sys.stderr)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn errors of the body into one sentence on stderr and an exit code: 2 for a UserError, 1 for a RunError.

    Any other exception is a defect of flashmem and keeps its traceback.
    """
    try:
        try:
            yield
        finally:
            _flush()  # a full disk or a closed pipe can still be reported here
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
        sys.exit(EXIT_RUN_FAILED)  # the reader of stdout closed it (`flashmem plan … | head`): nothing is left to report
    except OSError as error:
        _fail(_describe(error), EXIT_USER_ERROR)
    except MemoryError:
        _fail("the process ran out of memory", EXIT_RUN_FAILED)
    except KeyboardInterrupt:
        if interrupts.is_silent():
            sys.exit(interrupts.EXIT_CODE)
        _fail("interrupted", interrupts.EXIT_CODE)


def prepare_streams() -> None:
    """Prepare stdout and stderr for any output: file names of arbitrary bytes, and streams without a reader.

    A stream that was closed before Python started is opened on /dev/null. Otherwise the next opened file would get its
    descriptor.
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
    """Encode a file name as its original bytes, and other characters that the encoding lacks as an escape."""
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
    """Discard output that cannot be written to stdout; Python would try again at shutdown and print an error."""
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
