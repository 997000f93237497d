"""Ctrl-C on the command line at any time: exit code 130, at most one line, no partial files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ortools.sat.python import cp_model

from flashmem.planning.arithmetic.solver import cp_solver
from tests.support.paths import DATA

pytestmark = pytest.mark.build_apart

MODEL = DATA / "mobilenet-tiny.onnx"
ONE_LINE = (130, "flashmem: interrupted\n")


@pytest.fixture(autouse=True)
def sigint_is_not_ignored() -> Iterator[None]:
    """Reset SIGINT: a shell starts background processes with SIGINT ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


_COMMAND = """
import signal, sys, time

def interrupt():
    signal.raise_signal(signal.SIGINT)

module = sys.argv[1]
class AtImport:
    def find_spec(self, name, path, target=None):
        if name == module:
            interrupt()

sys.meta_path.insert(0, AtImport())
from flashmem.__main__ import main
{before}
sys.argv = ["flashmem", "devices", "--no-measure"]
main()
"""


def command(interrupted_at: str = "", before: str = "") -> tuple[int, str]:
    """Exit code and stderr of `flashmem devices`, interrupted at the import of a module, or by the code in `before`."""
    code = [sys.executable, "-c", _COMMAND.replace("{before}", before), interrupted_at]
    done = subprocess.run(code, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "module",
    ["argparse", "flashmem.cli.main", "flashmem.cli.commands.devices", "numpy._core._multiarray_umath", "pyopencl._cl"],
)
def test_an_interrupt_during_imports_is_one_line(module: str) -> None:
    assert command(module) == ONE_LINE


SWALLOWED = """
import flashmem.cli.commands.devices as devices
class Deleted:
    def __del__(self):
        interrupt()
def show(**options):
    Deleted()
    time.sleep(30)
devices.show_devices = show
"""
WHILE_CLEANING_UP = """
import flashmem.cli.commands.devices as devices
def show(**options):
    try:
        interrupt()
    finally:
        interrupt()
devices.show_devices = show
"""
WHILE_AN_ERROR_IS_TOLD = """
import flashmem.cli.commands.devices as devices
import flashmem.base.streams as console
def fail(**options):
    raise console.UserError("no")
def tell(*sentence):
    console._fail = told
    interrupt()
    told(*sentence)
told, console._fail, devices.show_devices = console._fail, tell, fail
"""
AFTER_THE_END = """
import atexit
import flashmem.cli.commands.devices as devices
devices.show_devices = lambda **options: atexit.register(interrupt)
"""
WHILE_THE_LAST_MODULE_LOADS = """
import flashmem.cli.commands.devices as devices
import atexit
def show(**options):
    sys.modules.pop("this", None)
    import this
    atexit.register(time.sleep, 0.2)
devices.show_devices = show
"""


def test_an_interrupt_during_the_last_import_does_not_outlive_the_command() -> None:
    """The command may end during the import, before the interrupt is retried after it."""
    code, said = command("this", before=WHILE_THE_LAST_MODULE_LOADS)
    assert (code, said) in ((0, ""), ONE_LINE)


def test_an_interrupt_that_python_cannot_raise_is_raised_a_little_later() -> None:
    assert command(before=SWALLOWED) == ONE_LINE


def test_a_second_interrupt_ends_the_process_without_a_word() -> None:
    assert command(before=WHILE_CLEANING_UP) == (130, "")


def test_a_command_that_has_ended_keeps_its_exit_code() -> None:
    assert command(before=WHILE_AN_ERROR_IS_TOLD) == (2, "flashmem: no\n")
    assert command(before=AFTER_THE_END) == (0, "")


@pytest.mark.parametrize("whole_group", [True, False], ids=["as a terminal does", "this process alone"])
@pytest.mark.parametrize("stage", ["", "import"])
def test_an_interrupt_while_run_compiles_ends_its_child_too(stage: str, whole_group: bool, tmp_path: Path) -> None:
    """Before the child's first output (during imports), and after it; the partial output is removed."""
    words = [sys.executable, "-m", "flashmem", "run", str(MODEL)]
    environment = {**os.environ, "FLASHMEM_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", LIST_DRIVERS], env=environment, check=True)
    kept = _files(tmp_path)
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    with process:
        if stage:
            assert process.stderr.readline() == f"flashmem: compiling {MODEL.name}: {stage}\n"
        else:
            while not (children := _children(process.pid)):
                time.sleep(0.01)
            assert len(children) == 1
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        said = [line for line in process.stderr if "compiling" not in line]
    assert (process.returncode, said) == (130, ["flashmem: interrupted\n"])
    assert _files(tmp_path) == kept


LIST_DRIVERS = "from flashmem.runtime.opencl.driver_table import driver_of; driver_of('auto')"
"""Fills the table of drivers, so that a command starts no children for it."""


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_an_interrupt_ends_a_search_of_the_solver() -> None:
    """A knapsack in many dimensions that takes longer than a minute. CP-SAT's own handler would end only the search."""
    model = cp_model.CpModel()
    chosen = [model.new_bool_var(str(index)) for index in range(300)]
    for row in range(200):
        weights = [(7 * row * column + 13 * column * column + row) % 50 + 1 for column in range(30)]
        model.add(sum(w * chosen[(row * 11 + 7 * column) % 300] for column, w in enumerate(weights)) <= 250)
    model.maximize(sum((31 * index) % 100 * variable for index, variable in enumerate(chosen)))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        cp_solver(1, 60).solve(model)
    assert time.monotonic() - begun < 30
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # and does not kill the process


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("devices --no-measure --json | head -c 0; exit ${PIPESTATUS[0]}", 1, ""),
        ("devices --no-measure > /dev/full", 2, "flashmem: no space left on the disk; free some or write elsewhere\n"),
        ("devices --no-measure --json > /dev/full", 2, "flashmem: no space left on the disk; free some or write elsewhere\n"),
        ("--version > /dev/full", 2, "flashmem: no space left on the disk; free some or write elsewhere\n"),
        ("devices --no-measure >&-", 0, ""),
        ("devices --no-measure 2>&-", 0, ""),
        ("devices --no-measure <&- >&- 2>&-", 0, ""),
    ],
)
def test_streams_without_a_reader_or_room(words: str, code: int, said: str) -> None:
    command = ["bash", "-c", f'"$0" -m flashmem {words}', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)
