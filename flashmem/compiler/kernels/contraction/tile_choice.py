"""The tile of a product: its config, cut to the matrix, and what it does with quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flashmem.compiler.configs.config import KernelConfig
from flashmem.compiler.configs.listed import configs_of
from flashmem.compiler.configs.workload import FLOATS, HALVES, TF32, Workload
from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.kernels.contraction.configs import (
    CODES,
    Contraction,
    PlainContraction,
    SlicedContraction,
    StagedContraction,
    plain_tile,
)
from flashmem.compiler.kernels.contraction.quantisation import WeightBinding
from flashmem.compiler.kernels.contraction.tensor_cores import CODES_PANEL, CodesContraction
from flashmem.compiler.kernels.contraction.tile import Layout, Operands
from flashmem.compiler.lowering.context import MOST_OFFSET, LoweringContext
from flashmem.compiler.operators.vector import REGISTER
from flashmem.compiler.selection.configs import estimates, measured_seconds, seconds
from flashmem.target.descriptor import DeviceDescriptor
from flashmem.target.instruction_set import PANEL

NARROWEST = 8
"""Columns of the narrowest panel that a budget may require: rows of packed codes of 4 bits are whole, and loads are vectors."""


def operands_of(context: LoweringContext, group: FusionGroup, weights: str, binding: WeightBinding, dots: str = "") -> Operands:
    """The operands of the product `group` with weights of type `weights`; `dots`: see `Operands`."""
    return Operands(
        weights, REGISTER[group.main.outputs[0].dtype], "uint" if dots else context.stored(group.main.input(0)),
        context.stored(group.output), binding.zero, binding.scale,
        binding.weight_zero, binding.weight_scale, binding.weight_minimum, binding.block, dots, binding.format,
    )  # fmt: skip


def config_for(
    context: LoweringContext,
    group: FusionGroup,
    workload: Workload,
    *,
    packed: bool = True,
    given: Contraction | None = None,
    winograd: bool = False,
) -> Contraction:
    """The config cut to the matrix: config `given`, or the one for `workload`. Products of other types than floats have the
    plain one.

    `winograd`: as in `compiler.selection.selector.KernelRequest`.
    """
    plain = None if _in_floats(context, group, workload) else plain_tile(context.descriptor, workload.family)
    config = given or plain or choice(context, group, workload, packed=packed, winograd=winograd)
    activation = context.stored(group.main.input(0))
    if workload.storage != TF32 and (activation != "half" or workload.weights != "float16"):
        config = config.in_float()
    if isinstance(config, PlainContraction) and not packed:
        config = replace(config, panel_columns=0)
    return config.cut(workload)


def _in_floats(context: LoweringContext, group: FusionGroup, workload: Workload) -> bool:
    """Whether operands and sums are floats."""
    operands = context.stored(group.main.input(0)) in ("float", "half") and workload.weights in FLOATS
    return operands and REGISTER[group.main.outputs[0].dtype] == "float"


def depth_vector(context: LoweringContext, group: FusionGroup, workload: Workload, config: Contraction, run: int) -> int:
    """`MainLoop.depth_vector` of a product whose left operand has `run` contiguous steps of depth."""
    whole = run % 4 == 0 and not config.staged_depth
    if not (whole and context.descriptor.code.vector_loads and _in_floats(context, group, workload)):
        return 1
    offsets = 4 * max(workload.depth * workload.columns, group.main.input(0).size)  # in bytes, of 32 bits
    return 4 if offsets < MOST_OFFSET else 1


def shares_epilogue(descriptor: DeviceDescriptor, config: Contraction) -> bool:
    """`MainLoop.shared_epilogue`."""
    return descriptor.kind == "cpu" and not config.staged_depth and config.rows * config.columns > config.vector


def layout_of(workload: Workload, config: Contraction, run: int) -> Layout:
    """The layout of a product with an unpacked right operand, whose left one has `run` contiguous steps of depth."""
    staged = config.staged_depth
    return Layout(
        whole=staged > 0 and run % staged == 0, aligned=workload.depth % 4 == 0, aligned_columns=workload.columns % 4 == 0
    )


def choice(
    context: LoweringContext, group: FusionGroup, workload: Workload, *, packed: bool = True, winograd: bool = False
) -> Contraction:
    """The config for `workload`, selected once for each weight, because all patches read the weight in one packing."""
    key = (group.main.input(1), replace(workload, rows=0), winograd)
    if not packed or key not in context.configs:
        widest = context.slicing.widest(workload.depth * (2 if workload.storage in HALVES else 4)) if packed else None
        forms = context.before.forms(group.main.input(1)) or context.earlier.forms(group.main) if packed else frozenset()
        halves = workload.storage == "float16" and context.stored(group.main.input(0)) == "half"
        config = context.selector.config(workload, [node.op for node in group.epilogue], widest, winograd, forms, halves)
        assert isinstance(config, Contraction)
        stored = [columns for columns, depth in forms if depth == workload.depth]
        context.configs[key] = _narrowed(config, max(stored)) if stored else _narrowed(config, widest)
    return context.configs[key]


def _narrowed(config: Contraction, widest: int | None) -> Contraction:
    """`config` with panels of at most `widest` columns, or `NARROWEST`: a slice has at least one panel. None: any width."""
    if not isinstance(config, PlainContraction) or widest is None or config.panel <= widest:
        return config
    columns = max(NARROWEST, 1 << max(1, widest).bit_length() - 1)
    return replace(config, columns=min(columns, config.columns), vector=min(config.vector, columns))


def pieces_of(context: LoweringContext, config: Contraction, activation: str) -> int:
    """`MainLoop.pieces`: a half has 11 bits, as TF32, a float 24; bfloat16 has 8."""
    if not isinstance(config, CodesContraction):
        return 0
    return 2 if context.tf32 or activation == "half" else 3


_SUMMED_COLUMNS = 64
_MOST_STRANDS = 4
"""Floats of sums that hide the latency of a multiply-add: four steps of two units of eight floats."""


def unscaled_sums(context: LoweringContext, config: Contraction, panel: int, operands: Operands) -> tuple[int, int]:
    """`MainLoop.strands` and `MainLoop.words`: a CPU sums the products of one row of floats and quantised weights unscaled."""
    scaled = operands.floats and operands.integers and operands.weight_scale is not None
    if context.descriptor.kind != "cpu" or config.rows > 1 or config.staged_depth or not scaled:
        return 0, 0
    in_buffers = context.memory_path == "buffer" or operands.format is not None
    in_words = (
        operands.nibbles and not (operands.format and operands.format.values) and in_buffers and config.vector == panel == PANEL
    )
    words = context.descriptor.vector_floats if in_words else 0
    return 1 if words else max(1, min(_MOST_STRANDS, _SUMMED_COLUMNS // config.columns)), words


def quantised_config(context: LoweringContext, workload: Workload, binding: WeightBinding) -> tuple[Contraction | None, int]:
    """The config by which a GPU multiplies floats by quantised weights, if it has one, and the width of packed panels, if its
    block spans several.

    Panels are those of the plain config for every number of rows, because all shapes of a model share its packed weights. For
    few rows, work-items share the depth of a panel; for few and more, tensor cores multiply codes. On devices without them, and
    for other blocks, the config with a K-block that is fastest for floats dequantises weights once for a block of rows.
    """
    scaled = binding.weight_scale is not None and binding.zero is binding.scale is None
    has_values = binding.format is not None and bool(binding.format.values)  # which the plain config looks up
    if workload.family != "matmul" or workload.storage not in CODES or not scaled or has_values:
        return None, 0
    listed = configs_of(context.descriptor, workload.family)
    panel = plain_tile(context.descriptor, workload.family).cut(workload).panel
    rivals = [each for each in listed if _multiplies(context, each, workload, binding, panel)]
    if not rivals:
        config = _dequantising(context.descriptor, workload, listed, panel)
        return config, panel if config else 0
    fastest = _fastest_on_codes(context.descriptor, workload, rivals)
    return fastest, 0 if isinstance(fastest, SlicedContraction) else panel


def _fastest_on_codes(descriptor: DeviceDescriptor, workload: Workload, rivals: Sequence[KernelConfig]) -> Contraction:
    """The fastest of the configs that multiply codes: measured, else the first for few rows, else by estimates."""
    times = measured_seconds(descriptor, workload, rivals)
    few = next((each for each in rivals if isinstance(each, SlicedContraction)), None)
    if not times and few is not None:
        return few
    times = times or estimates(descriptor, workload, rivals)
    fastest = min(times, key=lambda each: times[each])
    assert isinstance(fastest, Contraction)
    return fastest


def _dequantising(
    descriptor: DeviceDescriptor, workload: Workload, listed: Sequence[KernelConfig], panel: int
) -> StagedContraction | None:
    """The config with a K-block that is fastest for floats, and whose block is a multiple of panels of `panel` columns."""
    staged = [each for each in listed if isinstance(each, StagedContraction) and each.panel % panel == 0 and each.split_k == 1]
    times = seconds(descriptor, replace(workload, storage="float32")) if staged else {}
    return min((each for each in staged if each in times), key=lambda each: times[each], default=None)


def _multiplies(context: LoweringContext, config: KernelConfig, workload: Workload, binding: WeightBinding, panel: int) -> bool:
    """Whether `config` is for quantised weights alone, and can multiply these: no step of it may span two blocks."""
    if isinstance(config, SlicedContraction):
        return config.fits(workload) and binding.block % config.steps == 0
    if not isinstance(config, CodesContraction) or not config.fits(workload) or panel != CODES_PANEL:
        return False
    if binding.format is None:
        by_column = bool(binding.block) == bool(binding.by_block)  # not one scale for all columns of a block
        if not by_column or binding.block % config.step:
            return False
    return not (context.selector.limited and config.split_k > 1)
