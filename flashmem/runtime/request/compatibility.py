"""Compatibility of a bundle with a device: whether the device can run it, and in which transfer modes.

A bundle is compiled for one device and may be copied to any other. A driver would refuse it with an error code while a session
opens. These checks refuse it earlier, with a sentence.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from flashmem.base.errors import FlashmemWarning, UserError
from flashmem.base.pages import page_size
from flashmem.base.types import TEXEL_BYTES, TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.program.program import Program
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.measured_rates import tile_of
from flashmem.runtime.request.options import choose_mode
from flashmem.schedule.modes import MODES
from flashmem.schedule.plan import PoolLayout
from flashmem.schedule.residency import Strategy, preloaded_layout
from flashmem.target.descriptor import DeviceDescriptor, descriptor_names
from flashmem.target.instruction_set import same_tile


def for_processor(bundle: Bundle, device: Device) -> Bundle:
    """`bundle` with the code for the tile that is fastest on `device`, if it has some; warns if it has none.

    Raises:
        BundleError: see `Bundle.for_instruction_set`.
    """
    here = tile_of(device)
    found = bundle.for_instruction_set(here)
    compiled = found.descriptor.instruction_set
    if bundle.descriptor.name == device.descriptor_name and compiled and here and not same_tile(compiled, here):
        text = f"{bundle.path} was compiled for a processor with {compiled}, and this one has {here}"
        warnings.warn(FlashmemWarning(f"{text}; compiled here, it would be faster"), stacklevel=3)
    return found


def usable_modes(bundle: Bundle, device: Device, mode: str) -> DeviceDescriptor:
    """The descriptor of `device`, with the transfer modes that can run `bundle`; `mode` is the requested one, or "auto".

    Warns if the bundle was compiled for another device.

    Raises:
        UserError: the device cannot run the bundle, or not in that mode.
    """
    programs = [variant.program for variant in bundle.variants]
    target = bundle.descriptor.name
    misfit = next(filter(None, (_misfit(program, device) for program in programs)), "")
    if misfit:
        raise UserError(f"bundle {bundle.path}, which was compiled for {target}, {misfit}; compile the model for this device")
    reasons = _too_large_pools(bundle, device)
    reasons |= {mode: reason for program in programs for mode, reason in _reasons(program, device).items()}
    for refused, reason in reasons.items():
        if refused == mode:
            what = f"bundle {bundle.path} cannot run in mode {mode} here"
            raise UserError(f"{what}: {reason}; name another mode, or compile the model here")
    if target != device.descriptor_name and target in descriptor_names():
        here = f"{device.name} ({device.descriptor_name})"
        text = f"{bundle.path} was compiled for {target} and runs on {here}; compiled for that, it would be faster"
        warnings.warn(FlashmemWarning(text), stacklevel=5)
    descriptor = descriptor_for(device, bundle.descriptor.probed)
    path = bundle.program.memory_path
    if not reasons or path not in descriptor.modes:
        return descriptor
    left = tuple(each for each in descriptor.modes[path] if each not in reasons)
    return replace(descriptor, modes={**descriptor.modes, path: left})


def mode_for(bundle: Bundle, device: Device, mode: str, strategy: Strategy = "stream") -> TransferMode:
    """The transfer mode of a session or a model: `mode`, or for "auto" the bundle's planned mode, if the device has it.

    Raises:
        UserError: the device cannot run the bundle, or not in that mode.
        NoLayoutError: as `choose_mode`.
    """
    first, *others = (variant.plan.layouts for variant in bundle.variants)
    laid_out = [known for known in first if all(known in layouts for layouts in others)]
    path = bundle.program.memory_path
    planned = bundle.meta.get("mode")
    descriptor = usable_modes(bundle, device, mode)
    chosen = choose_mode(descriptor, mode, path=path, planned=planned, strategy=strategy, layouts=laid_out)
    if strategy == "preload":
        for variant in bundle.variants:
            threads = variant.plan.loader_threads
            shares = device.unified_memory
            layout = preloaded_layout(variant.program, chosen, threads, shares_memory=shares)
            if reason := too_large(layout, device):
                raise UserError(f"bundle {bundle.path} cannot be preloaded here: {reason}; stream it")
    return chosen


def _too_large_pools(bundle: Bundle, device: Device) -> dict[TransferMode, str]:
    """Transfer modes whose layout has an allocation that the device cannot make, each with the reason."""
    reasons: dict[TransferMode, str] = {}
    for variant in bundle.variants:
        for mode in MODES:
            if mode in variant.plan.layouts and (reason := too_large(variant.plan.layouts[mode], device)):
                reasons[mode] = reason
    return reasons


def too_large(layout: PoolLayout, device: Device) -> str:
    """The allocation of a layout that the device cannot make, for a message; "" if it can make all."""
    found = layout.larger_than(device.max_alloc_bytes) if device.max_alloc_bytes else None
    if found is None:
        return ""
    return f"{found[0]} {found[1]} bytes in one buffer, and {device.name} allocates at most {device.max_alloc_bytes} at a time"


def _misfit(program: Program, device: Device) -> str:
    """The memory object of the program that the device cannot allocate, for a message; "" if it can allocate all."""
    most = device.max_alloc_bytes
    memories = {"activations": program.arena_bytes, "states": program.states_bytes, "constants": program.constants_bytes}
    for what, nbytes in memories.items():
        if 0 < most < nbytes:
            return f"has {nbytes} bytes of {what} in one buffer, and {device.name} allocates at most {most} at a time"
    if program.memory_path == "texture" and device.has_images:
        width = device.image_max_width
        height = device.image_max_height
        for part in program.slices:
            if part.width > width or (part.is_image and part.height > height):
                size = f"{part.width} x {part.height}"
                return f"has textures of {size} texels, and {device.name} supports them up to {width} x {height}"
    return ""


def _reasons(program: Program, device: Device) -> dict[TransferMode, str]:
    """Transfer modes of the device that cannot run the program, each with the reason."""
    reasons: dict[TransferMode, str] = {}
    if program.page_bytes % page_size():
        pages = f"its weights are in pages of {program.page_bytes} bytes, and this system has pages of {page_size()}"
        reasons |= {mode: pages for mode, kind in MODES.items() if kind.by_pages}
    if program.memory_path == "texture" and device.has_image_from_buffer:
        texels = device.image_pitch_alignment
        if any(part.row_pitch % (texels * TEXEL_BYTES[part.channel]) for part in program.slices if part.is_image):
            reason = (
                f"its textures have rows that are not multiples of {texels} texels, as {device.name} requires over a buffer"
            )
            reasons |= {mode: reason for mode, kind in MODES.items() if not kind.copies}
    return reasons
