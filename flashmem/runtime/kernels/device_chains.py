"""The chains that a device uses: none that its driver compiles wrongly."""

from __future__ import annotations

from dataclasses import replace

from flashmem.program.kernel_text import Source, kernel_source, kernel_texts
from flashmem.program.launches import SteadyLaunch
from flashmem.program.program import Program
from flashmem.runtime.kernels.chains import is_chain, with_chains
from flashmem.runtime.kernels.verdicts import Verdicts, text_key
from flashmem.runtime.opencl.device import Device
from flashmem.target.descriptor import DeviceDescriptor


def chained(
    program: Program, source: Source, descriptor: DeviceDescriptor, device: Device, *, all_of_them: bool = False
) -> tuple[Program, Source]:
    """`program` with the chains that `device` uses, and `source` with their kernels.

    `all_of_them`: also those that are known to be wrong, for a check.

    A chain is left out if it, or the kernel of one of its parts, is known to be wrong: its text has theirs, which is optimised
    again. Its parts are used then, each as it is right. Where kernels get masks for their reads, compilers take minutes for the
    text of a chain, and there is none.
    """
    if device.reads_unasked:
        return program, source
    made, joined = with_chains(program, source, descriptor, device.compute_units)
    if all_of_them or made is program:
        return made, joined
    verdicts = Verdicts(device)
    texts = kernel_texts(joined.plain)

    def is_wrong(each: SteadyLaunch) -> bool:
        parts = made.launches[each.first - 1 : each.last]
        names = {each.launch.kernel, *(part.kernel for part in parts)}
        return any(verdicts[text_key(device, texts[name], made.build_options)].wrong for name in names)

    wrong = {each.launch.kernel for each in made.steady if verdicts.wrong and is_chain(each.launch) and is_wrong(each)}
    if not wrong:
        return made, joined
    left = {name: text for name, text in texts.items() if name not in wrong}
    steady = tuple(each for each in made.steady if each.launch.kernel not in wrong)
    kernels = tuple(name for name in joined.kernels if name not in wrong)
    return replace(made, steady=steady), replace(joined, plain=kernel_source(left), kernels=kernels)
