"""Replacements of programs and kernels: permitted language features, arguments, and launches."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyopencl as cl

from tests.support.strict_device.commands import Access, Memory
from tests.support.strict_device.dot_products import BUILT_INS, imitated
from tests.support.strict_device.objects import StrictContext, StrictEvent, StrictImage, StrictMemory, StrictQueue, World
from tests.support.strict_device.registers import private_values, required_group
from tests.support.strict_device.transfers import Waits, commands, reals

_MAGIC = b"strict device: source\n"
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PRAGMA = re.compile(r"#\s*pragma\s+OPENCL\s+EXTENSION\s+(\w+)\s*:\s*(?:enable|require)")
_CONDITION = re.compile(r"^#\s*ifdef (cl_\w+)\n.*?^#\s*(?:else|endif)", re.DOTALL | re.MULTILINE)
_STANDARD = re.compile(r"-cl-std=CL(\d)\.(\d)")
_OPTIONAL = {  # names in kernels, and the extension that defines each
    r"\bdouble\d*\b": "cl_khr_fp64",
    r"\bsub_group_\w+": "cl_khr_subgroups",
    r"\batom_\w+": "cl_khr_int64_base_atomics",
    r"\bhalf\d*\s+\w+\s*[=;,(]": "cl_khr_fp16",
} | BUILT_INS

_built: dict[tuple[int, str, tuple[str, ...]], Any] = {}
"""Real programs by device, source and options, for all strict devices."""

_parameters: dict[tuple[str, str], tuple[Parameter, ...]] = {}
"""Parameters of kernels, by source and name."""

_groups: dict[tuple[str, str], tuple[int, tuple[int, int, int] | None]] = {}
"""Registers of kernels, and the work-groups that they require, by source and name."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel."""

    name: str
    kind: str  # "buffer", "image", "local" or "value"
    reads: bool = False
    writes: bool = False
    constant: bool = False


class StrictProgram:
    """A program. Its binary is its source: all strict devices share the real programs.

    `compiled` has the kernels that its binary is complete for; None: all of them.
    """

    def __init__(self, context: StrictContext, source: Any, binaries: Sequence[bytes] | None = None) -> None:
        self.world = context.world
        self.source, self.options = str(source), ("",)
        self.loaded = binaries is not None
        self.compiled: set[str] | None = set() if self.world.profile.compiles_kernels_apart else None
        if binaries is not None:
            text = bytes(binaries[0])
            if not text.startswith(_MAGIC):
                raise cl.LogicError("clCreateProgramWithBinary", cl.status_code.INVALID_BINARY, "not a strict device's")
            self.source, _, compiled = json.loads(text[len(_MAGIC) :])
            self.compiled = None if compiled is None else set(compiled)
        self.real: Any = None

    def build(self, options: Sequence[str] = (), *_: object, **__: object) -> StrictProgram:
        """clBuildProgram."""
        self.options = tuple(options)
        check_source(self.world, self.source, self.options)
        if not any(_STANDARD.match(each) for each in self.options):
            self.options = (*self.options, "-cl-std=CL1.2")
        source = imitated(self.world.profile.extensions) + self.source
        key = self.world.real.int_ptr, source, self.options
        if key not in _built:
            options = [*self.options, "-cl-opt-disable"]  # only the calls are under test
            _built[key] = cl.Program(self.world.context, source).build(options, cache_dir=False)
        self.real = _built[key]
        return self

    def get_info(self, what: Any) -> list[bytes]:
        """The binary."""
        assert what == cl.program_info.BINARIES
        compiled = None if self.compiled is None else sorted(self.compiled)
        return [_MAGIC + json.dumps([self.source, self.options, compiled]).encode()]

    def create(self, kernel: str) -> None:
        """Compile a kernel, on a device that does so when its object is created.

        Raises:
            BrokenRuleError: the program was loaded from a binary that lacks the kernel, so it is compiled in each process.
        """
        if self.compiled is None or kernel in self.compiled:
            return
        if self.loaded:
            self.world.rules.broke("binary", f"{kernel} is compiled again: its binary was fetched before it was created")
        self.compiled.add(kernel)


def check_source(world: World, source: str, options: Sequence[str]) -> None:
    """Raise BrokenRuleError if a program uses a feature that the profile lacks."""
    profile, text = world.profile, _COMMENTS.sub(" ", source)
    text = _CONDITION.sub(lambda part: part[0] if part[1] in profile.extensions else "", text)
    wanted = set(_PRAGMA.findall(text))
    wanted |= {extension for pattern, extension in _OPTIONAL.items() if re.search(pattern, text)}
    for extension in sorted(wanted - profile.extensions):
        world.rules.broke("extension", f"a kernel uses {extension}, which {profile.name} does not have")
    have = re.match(r"OpenCL (\d)\.(\d)", profile.version)
    assert have is not None
    for option in options:
        asked = _STANDARD.match(option)
        if asked and asked.groups() > have.groups():
            world.rules.broke("extension", f"a program is built with {option}, and {profile.name} has {have[0]}")


class StrictKernel:
    """A kernel with its arguments, which it does not keep alive."""

    def __init__(self, program: StrictProgram, name: str) -> None:
        self.world, self.function_name = program.world, name
        self.real = cl.Kernel(program.real, name)
        program.create(name)
        self.int_ptr = self.real.int_ptr
        self.num_args = self.real.num_args
        key = program.source, name
        if key not in _parameters:
            text = _COMMENTS.sub(" ", program.source)
            _parameters[key] = declared(program.source, name)
            _groups[key] = private_values(text, name), required_group(text, name)
        self.parameters = _parameters[key]
        self.registers, self.required_group = _groups[key]
        assert len(self.parameters) == self.num_args, f"the text of {name} was not understood"
        self.given: dict[int, Callable[[], Any]] = {}  # the arguments; memory objects are not kept alive
        self._memory: dict[int, Memory] = {}
        self._images: dict[int, Any] = {}
        self._bytes: dict[int, int] = {}
        self._checked = False
        self.world.handles[self.int_ptr] = self

    def set_arg(self, index: int, value: Any) -> None:
        """clSetKernelArg."""
        parameter, rules = self.parameters[index], self.world.rules
        where = f"argument {parameter.name} of {self.function_name}"
        self._checked = False
        self.given[index] = weakref.ref(value) if isinstance(value, StrictMemory) else partial(_number, value)
        self._memory.pop(index, None)
        self._images.pop(index, None)
        if isinstance(value, StrictMemory):
            rules.check_alive(value.memory, where)
            if parameter.kind != ("image" if isinstance(value, StrictImage) else "buffer"):
                rules.broke("arguments", f"{where} is {value.memory.what}, and takes a {parameter.kind}")
            if parameter.writes and not value.memory.kernels_write:
                rules.broke("arguments", f"{where} is written, and {value.memory.what} was made for reading only")
            self._memory[index], self._bytes[index] = value.memory, 8
            if isinstance(value, StrictImage):
                self._images[index] = value.refresh
            self.real.set_arg(index, value.real)
        elif isinstance(value, np.generic):
            self._bytes[index] = value.nbytes
            self.real._set_arg_buf(index, value)
        else:
            raise NotImplementedError(f"the strict device does not know {type(value).__name__} as an argument")

    _set_arg_buf = set_arg

    def accesses(self) -> list[Access]:
        """The accesses of a launch, as far as the parameters show: all of each object."""
        found = []
        for index, memory in self._memory.items():
            parameter = self.parameters[index]
            if parameter.reads:
                found.append(Access.whole(memory, writes=False))
            if parameter.writes:
                found.append(Access.whole(memory, writes=True))
        return found

    def check(self) -> None:
        """Raise BrokenRuleError unless all arguments are set, and the device supports their number and size."""
        if self._checked:
            return
        profile, world, name = self.world.profile, self.world, self.function_name
        missing = [p.name for index, p in enumerate(self.parameters) if p.kind != "local" and index not in self._bytes]
        if missing:
            world.rules.broke("arguments", f"{name} is launched, and its argument {missing[0]} was never set")
        world.limit(f"bytes of arguments of {name}", sum(self._bytes.values()), profile.max_parameters)
        images = [p for p in self.parameters if p.kind == "image"]
        world.limit(f"images that {name} reads", sum(p.reads for p in images), profile.read_images)
        world.limit(f"images that {name} writes", sum(p.writes for p in images), profile.write_images)
        constant = [index for index, p in enumerate(self.parameters) if p.constant]
        world.limit(f"constant arguments of {name}", len(constant), profile.constant_arguments)
        for index in constant:
            size = self._memory[index].end - self._memory[index].start
            world.limit(f"bytes of a constant argument of {name}", size, profile.constant_bytes)
        local = int(self.real.get_work_group_info(cl.kernel_work_group_info.LOCAL_MEM_SIZE, world.real))
        world.limit(f"bytes of local memory of {name}", local, profile.local_memory)
        self._checked = True

    def refresh(self, queue: Any) -> None:
        """Update images that are views of buffers."""
        for refresh in self._images.values():
            refresh(queue)


def _number(value: Any) -> Any:
    return value


def declared(source: str, kernel: str) -> tuple[Parameter, ...]:
    """The parameters of a kernel, parsed from its text: drivers report them only for programs built with an option."""
    text = _COMMENTS.sub(" ", source)
    found = re.search(rf"\b(?:__)?kernel\b[^;{{}}]*?\b{kernel}\s*\(", text)
    assert found is not None, f"no kernel {kernel}"
    depth, parameters, words = 1, [], ""
    for letter in text[found.end() :]:
        depth += (letter == "(") - (letter == ")")
        if not depth or (letter == "," and depth == 1):
            parameters.append(words)
            words = ""
        else:
            words += letter
        if not depth:
            break
    return tuple(_parameter(each) for each in parameters if each.strip() not in ("", "void"))


def _parameter(declaration: str) -> Parameter:
    words = [word.strip("_") for word in re.findall(r"\w+|\*", declaration)]
    name, before = words[-1], words[: words.index("*")] if "*" in words else []
    if any(word.startswith("image2d_t") for word in words):
        writes = "write_only" in words
        return Parameter(name, "image", reads=not writes, writes=writes)
    if not before:
        return Parameter(name, "value")
    if "local" in before:
        return Parameter(name, "local")
    constant = "constant" in before
    return Parameter(name, "buffer", reads=True, writes=not constant and "const" not in before, constant=constant)


def launch(
    queue: StrictQueue,
    kernel: StrictKernel,
    global_size: tuple[int, ...],
    local_size: tuple[int, ...] | None,
    waits: Waits = None,
) -> StrictEvent:
    """clEnqueueNDRangeKernel."""
    world, profile, name = queue.world, queue.world.profile, kernel.function_name
    kernel.check()
    if local_size is not None:
        if len(local_size) != len(global_size) or any(size % part for size, part in zip(global_size, local_size, strict=True)):
            world.rules.broke("arguments", f"{name} has {global_size} work-items in groups of {local_size}: not whole groups")
        most, items = profile.group_of(kernel.registers), int(np.prod(local_size))
        world.limit(f"work-items of a group of {name}, which has {kernel.registers} registers", items, most)
        required = kernel.required_group
        if required is not None and (*local_size, 1, 1)[:3] != required:
            world.rules.broke("arguments", f"{name} is launched in groups of {local_size}, and requires {required}")
        for size, most in zip(local_size, profile.max_group_sizes, strict=False):
            world.limit(f"work-items of a group of {name} in one direction", size, most)
    accesses = kernel.accesses()
    with queue.lock:
        command = world.rules.enqueue(queue.number, "kernel", f"kernel {name}", accesses, commands(waits))
        if waits:
            cl.enqueue_barrier(queue.real, wait_for=reals(waits))  # updated views of buffers must be complete
        kernel.refresh(queue.real)
        real = cl.enqueue_nd_range_kernel(queue.real, kernel.real, global_size, local_size)
        for each in accesses:
            if each.writes:
                world.wrote(each.memory)
        return StrictEvent(queue, command, real)
