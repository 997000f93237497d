"""A request, resolved against a device: its descriptor, memory path and transfer mode.

`compile`, `simulate`, `sweep` and `plan` use it; `runtime.request.options` resolves the options of a session. So the same words
have the same meaning everywhere, and are refused with the same message.
"""

from __future__ import annotations

from flashmem.base.errors import UserError
from flashmem.base.types import Precision
from flashmem.compiler.options import Options
from flashmem.request.request import BundleRequest
from flashmem.runtime.request.options import choose_mode, find_descriptor
from flashmem.target.descriptor import DeviceDescriptor


def resolve(request: BundleRequest) -> Options:
    """What `request` asks for of its device, for its first shape variant.

    The resolved request names the device, its memory path, the mode and the precision of states, so that equal ones are equal.

    Raises:
        UserError: no such device, or it lacks the memory path, the mode or the precision.
    """
    descriptor = find_descriptor(request.device, request.memory_path)
    check_precision(descriptor, request.precision)
    mode = choose_mode(descriptor, request.mode)
    resolved = request.replace(
        device=descriptor.name,
        memory_path=descriptor.memory_paths[0],
        mode=mode,
        state_precision=request.resolved_state_precision,
    )
    return Options(descriptor, mode, resolved, request.shapes[0])


def check_precision(descriptor: DeviceDescriptor, precision: Precision) -> None:
    """Check that the device multiplies in `precision`.

    Raises:
        UserError: it has no tensor cores for TF32, or they would not be used.
    """
    if precision != "tf32":
        return
    from flashmem.compiler.configs.listed import listed_configs  # the compiler, which a cached bundle is found without
    from flashmem.compiler.kernels.contraction.tensor_cores import Tf32Contraction

    if not any(isinstance(each, Tf32Contraction) for each in listed_configs(descriptor)):
        raise UserError(
            f"--precision tf32 is for NVIDIA's tensor cores (compute capability 8.0), which device {descriptor.name} does not "
            "have; use --precision fp32"
        )
    if descriptor.memory_paths[0] != "buffer":
        raise UserError("--precision tf32 needs weights in buffers, not in textures; use --memory-path buffer")
