"""The OpenCL devices of this machine: drivers are started, and devices described and found.

The loader starts all drivers at its first call, once in a process. A command that uses one device loads one driver
(`driver_table.py`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

from flashmem.base.errors import NoDeviceError, UserError
from flashmem.base.interrupts import is_command
from flashmem.base.threads import Waiters, started
from flashmem.runtime.opencl import driver_table, undocumented
from flashmem.runtime.opencl.binding import cl as cl
from flashmem.runtime.opencl.compile_target import compile_target, driver_variables
from flashmem.runtime.opencl.device import IMAGE_FROM_BUFFER, NVIDIA_ATTRIBUTES, Device
from flashmem.runtime.opencl.devices import choose
from flashmem.runtime.opencl.dot_products import KHRONOS, cpu_dots, gpu_dots
from flashmem.runtime.opencl.icd import installed_drivers, vendors_folder
from flashmem.runtime.opencl.instruction_set import instruction_set
from flashmem.runtime.opencl.pocl import one_thread_a_core, writable_pocl_cache

_IMAGE_PITCH_ALIGNMENT = 0x104A
_IMAGE_BASE_ALIGNMENT = 0x104B  # not in pyopencl's wheels

_COMPUTE_CAPABILITY_MAJOR = 0x4000  # CL_DEVICE_COMPUTE_CAPABILITY_MAJOR_NV
_DOT_PRODUCT_CAPABILITIES = 0x1073  # CL_DEVICE_INTEGER_DOT_PRODUCT_CAPABILITIES_KHR; bit 0: packed words
_DOT_PRODUCT_ACCELERATION = 0x1075  # CL_DEVICE_INTEGER_DOT_PRODUCT_ACCELERATION_PROPERTIES_4x8BIT_PACKED_KHR; signed first
_SVM_CAPABILITIES = 0x1053  # bit 0: coarse-grained buffers; bit 1: fine-grained ones

_one_driver = False
_only: str | None = None
"""Whether this process uses one device, and loads its driver alone; and the driver that it loads, None for all."""

_started_in: int | None = None
"""The process that started the drivers: this one, or the one it was forked from."""


_starting = threading.Lock()
_begun = Waiters()
_begun_lock = threading.Lock()  # who waits until drivers are starting
_BEGIN_SECONDS = 0.02

_surroundings: tuple[int, ExitStack] | None = None
"""While the variables that drivers read at their start are set: the thread that has set them, and what takes them back. Only
that thread does, in calls of the user: C code in other threads may read variables meanwhile, which nothing protects.
"""


def list_devices() -> tuple[Device, ...]:
    """All OpenCL devices, including those of drivers from pip. Starts the drivers once in a process.

    Those of one driver, after `use_driver` or a search with `use_one_device`. Empty if no driver is installed.

    Raises:
        UserError: no temporary folder can be written.
    """
    with _starting:
        try:
            return _list_all()
        finally:
            leave_surroundings()


def begin_to_start_drivers() -> None:
    """Start the drivers in a thread, for which `list_devices` then waits: some take 0.1 s. Nothing if one of several is to be
    loaded, which is not decided yet. The caller's next `list_devices`, or `leave_surroundings`, must follow.

    Raises:
        RunError: the system has no more threads.
    """

    def work() -> None:
        with suppress(UserError):  # the caller of `list_devices` gets it again
            list_devices()

    if not _list_all.cache_info().currsize and not (_one_driver and len(installed_drivers()) > 1):
        with suppress(UserError):
            _enter_surroundings()
        with _begun_lock:
            turn = _begun.turn()
        started(work, "flashmem-drivers", daemon=False)  # the process must not exit meanwhile
        turn.acquire(timeout=_BEGIN_SECONDS)  # else the interpreter's lock would keep that thread from them


def forget_devices() -> None:
    """Let the next `list_devices` look again. For tests: the loader never starts a driver twice."""
    _list_all.cache_clear()
    _failures.clear()


@functools.cache
def _list_all() -> tuple[Device, ...]:
    global _started_in
    _started_in = os.getpid()
    _enter_surroundings()
    with _begun_lock:
        _begun.wake()
    undocumented.start_drivers()
    found: list[Device] = []
    with _note_errors("the OpenCL loader"):
        for number, platform in enumerate(cl.get_platforms()):
            name = f"OpenCL driver {number}"
            with _note_errors(name):
                name = str(platform.name).strip() or name
            with _note_errors(name):
                for device in platform.get_devices():
                    with _note_errors(name):
                        found += [_describe(platform, device)] if device.available else []
    return tuple(found)


_failures: list[str] = []
"""What failed when devices were listed."""


@contextmanager
def _note_errors(what: str) -> Iterator[None]:
    """End the body at an OpenCL error of `what`, and note it: the other drivers can be used. No device is no error."""
    try:
        yield
    except (cl.Error, UnicodeDecodeError) as error:  # a broken driver gives names that are no text
        code = getattr(error, "code", None)
        if code not in (cl.status_code.PLATFORM_NOT_FOUND_KHR, cl.status_code.DEVICE_NOT_FOUND):
            name = cl.status_code.to_string(code, "code %d") if isinstance(code, int) else str(error)
            _failures.append(f"{what} failed: {getattr(error, 'routine', None) or 'a text of its own'} ({name})")


def driver_failures() -> tuple[str, ...]:
    """The OpenCL calls that failed when the devices were listed, each with its driver. The other devices can be used."""
    return tuple(_failures)


def device_at(number: int) -> Device:
    """Device `number` of `list_devices`, for a child process that was told the number.

    Raises:
        NoDeviceError: there are fewer here; with what drivers failed at.
    """
    devices = list_devices()
    if number < len(devices):
        return devices[number]
    raise _with_failures(NoDeviceError(f"there is no OpenCL device {number} in this process, only {len(devices)}"))


def _with_failures(error: NoDeviceError) -> NoDeviceError:
    return NoDeviceError("; ".join((str(error), *_failures)))


def _enter_surroundings() -> None:
    """Set the variables that drivers read at their start, unless they are set. Raises UserError: no folder can be written."""
    global _surroundings
    if _surroundings is None:
        with ExitStack() as entered:
            one_thread_a_core()
            entered.enter_context(vendors_folder(_only))
            entered.enter_context(writable_pocl_cache())
            _surroundings = threading.get_ident(), entered.pop_all()


def leave_surroundings() -> None:
    """Once devices are listed: take back the variables that this thread has set for the drivers."""
    global _surroundings
    listed = _list_all.cache_info().currsize
    if listed and _surroundings is not None and _surroundings[0] == threading.get_ident():
        (_, entered), _surroundings = _surroundings, None
        entered.close()


def started_before_fork() -> bool:
    """Whether the drivers were started by a process that this one was forked from."""
    return _started_in not in (None, os.getpid())


def use_driver(driver: str | None) -> None:
    """Load only this one of `icd.installed_drivers`, if no driver is loaded yet."""
    global _only
    if not _list_all.cache_info().currsize:
        _only = driver


def driver_for(device: Device) -> str | None:
    """The one of `icd.installed_drivers` that has `device`, for a child process that uses it; None if that is not known."""
    return _only or driver_table.known_driver(device.platform, device.name)


def use_one_device() -> None:
    """Load only the driver of the device that this process asks for first, if the table of drivers knows it.

    For a command that uses one device: other devices cannot be found afterwards. No effect in a process that is no command.
    """
    global _one_driver
    _one_driver = is_command()


def find_device(name: str = "auto", prefer: str | None = None) -> Device:
    """The device called `name` (see `devices.choose`).

    Raises:
        NoDeviceError: no device, or none of that name.
    """
    if _one_driver and not _list_all.cache_info().currsize:
        use_driver(driver_table.driver_of(name, prefer))
    try:
        return choose(list_devices(), name, prefer)
    except NoDeviceError as error:
        if _only is not None:  # unplugged, for instance: the next process looks again
            driver_table.forget()
        raise _with_failures(error) from error


def _describe(platform: Any, device: Any) -> Device:
    kinds: dict[int, Literal["cpu", "gpu"]] = {int(cl.device_type.CPU): "cpu", int(cl.device_type.GPU): "gpu"}
    kind: Literal["cpu", "gpu", "other"] = next((kind for bit, kind in kinds.items() if int(device.type) & bit), "other")
    extensions = frozenset(device.extensions.split())
    images = bool(device.image_support)
    instructions = instruction_set(platform.name, device.version) if kind == "cpu" else ""
    has_view = images and IMAGE_FROM_BUFFER in extensions
    shared = _raw_info(device, _SVM_CAPABILITIES, 8)
    return Device(
        platform=platform.name.strip(),
        platform_version=platform.version.strip(),
        name=device.name.strip(),
        vendor=device.vendor.strip(),
        version=device.version.strip(),
        driver_version=device.driver_version.strip(),
        kind=kind,
        extensions=extensions,
        has_images=images,
        image_max_width=device.image2d_max_width if images else 0,
        image_max_height=device.image2d_max_height if images else 0,
        image_pitch_alignment=_raw_info(device, _IMAGE_PITCH_ALIGNMENT) if has_view else 0,
        image_base_alignment=_raw_info(device, _IMAGE_BASE_ALIGNMENT) if has_view else 0,
        base_address_alignment=max(1, device.mem_base_addr_align // 8),
        max_alloc_bytes=device.max_mem_alloc_size,
        global_memory_bytes=device.global_mem_size,
        unified_memory=bool(device.host_unified_memory),
        compute_units=device.max_compute_units,
        handle=device,
        local_memory_bytes=device.local_mem_size,
        max_group_items=device.max_work_group_size,
        mma=NVIDIA_ATTRIBUTES in extensions and _raw_info(device, _COMPUTE_CAPABILITY_MAJOR) >= 8,
        fuses=bool(device.single_fp_config & cl.device_fp_config.FMA),
        target=compile_target(platform.name, kind),
        instruction_set=instructions,
        dots=_gpu_dots(device, extensions) if kind != "cpu" else cpu_dots(platform.name, device.driver_version, instructions),
        variables=driver_variables(platform.name),
        by_address=platform.name.startswith("NVIDIA") and bool(shared & 1),
        coherent=bool(shared & 2),
    )


def _gpu_dots(device: Any, extensions: Collection[str]) -> str:
    """The instruction for dot products of a GPU (`Device.dots`)."""
    if NVIDIA_ATTRIBUTES in extensions:
        return "dp4a" if _raw_info(device, _COMPUTE_CAPABILITY_MAJOR) >= 7 else ""
    if KHRONOS not in extensions or not _raw_info(device, _DOT_PRODUCT_CAPABILITIES, 8) & 1:
        return gpu_dots(extensions)
    return gpu_dots(extensions, _raw_numbers(device, _DOT_PRODUCT_ACCELERATION, 6))


def _raw_numbers(device: Any, parameter: int, count: int) -> list[int]:
    """Numbers of 32 bits of clGetDeviceInfo; zeros if the driver does not know them."""
    values = (ctypes.c_uint * count)()
    failed = undocumented.library().clGetDeviceInfo(
        ctypes.c_void_p(device.int_ptr), ctypes.c_uint(parameter), ctypes.c_size_t(4 * count), ctypes.byref(values), None
    )
    return [0] * count if failed else list(values)


def _raw_info(device: Any, parameter: int, nbytes: int = 4) -> int:
    """A number of clGetDeviceInfo that not every pyopencl has a name for; 0 if the driver does not know it."""
    value = ctypes.c_ulonglong(0)
    failed = undocumented.library().clGetDeviceInfo(
        ctypes.c_void_p(device.int_ptr), ctypes.c_uint(parameter), ctypes.c_size_t(nbytes), ctypes.byref(value), None
    )
    return 0 if failed else value.value
