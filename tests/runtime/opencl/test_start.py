"""Drivers are started once, in a thread while the caller reads its bundle, and only those that are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

_BEGIN = """
import threading, time
from flashmem.runtime.opencl import discovery, undocumented

started, start = [], undocumented.start_drivers

def slow():
    started.append(threading.current_thread().name)
    time.sleep(0.05)
    start()

undocumented.start_drivers = slow
"""

_IN_A_THREAD = """
discovery.begin_to_start_drivers()
assert started == ["flashmem-drivers"]
lists = []
threads = [threading.Thread(target=lambda: lists.append(discovery.list_devices())) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
discovery.begin_to_start_drivers()
assert len(started) == 1 and lists[0] and lists[0] is lists[1] is lists[2], (started, lists)
"""

_A_COMMAND = """
discovery._one_driver = True
discovery.installed_drivers = lambda: {"one.icd": "libone.so", "two.icd": "libtwo.so"}
discovery.begin_to_start_drivers()
assert not started
discovery.installed_drivers = lambda: {"one.icd": "libone.so"}
discovery.begin_to_start_drivers()
assert started == ["flashmem-drivers"]
discovery.list_devices()
"""


_SURROUNDINGS = """
import contextlib, os
from flashmem.runtime.engine.device_state import DeviceOpening

before, folder = dict(os.environ), discovery.vendors_folder

@contextlib.contextmanager
def noted(only):
    changes.append(threading.current_thread().name)
    with folder(only) as found:
        yield found
    changes.append(threading.current_thread().name)

changes, discovery.vendors_folder = [], noted
discovery.begin_to_start_drivers()
with DeviceOpening("auto", prefer=None, profiling=False) as opening:
    opening.found().open()
assert changes == ["MainThread"] * 2 and started == ["flashmem-drivers"], changes
assert {name: os.environ[name] for name in os.environ if name != "POCL_AFFINITY"} == {
    name: before[name] for name in before if name != "POCL_AFFINITY"
}
"""


@pytest.mark.parametrize(
    "what",
    [_IN_A_THREAD, _A_COMMAND, _SURROUNDINGS],
    ids=["a program", "a command, with one of two drivers", "variables of the process"],
)
def test_drivers_are_started_once_in_a_thread(what: str) -> None:
    done = subprocess.run([sys.executable, "-c", _BEGIN + what], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
