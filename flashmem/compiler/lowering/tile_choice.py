"""The tile of a product: its config, cut to the matrix, and what it does with quantised weights."""

from __future__ import annotations

from dataclasses import replace

from flashmem.compiler.ir.fusion_group import FusionGroup
from flashmem.compiler.lowering.context import MOST_OFFSET, LoweringContext
from flashmem.compiler.lowering.quantisation import WeightBinding
from flashmem.compiler.lowering.tile import ContractionTile
from flashmem.compiler.operators.vector import REGISTER
from flashmem.compiler.selection.configs import estimates, measured_seconds, seconds
from flashmem.target.descriptor import DeviceDescriptor
from flashmem.target.instruction_set import PANEL
from flashmem.target.kernel_configs.config import KernelConfig
from flashmem.target.kernel_configs.contraction import (
    CODES,
    Contraction,
    PlainContraction,
    SlicedContraction,
    StagedContraction,
)
from flashmem.target.kernel_configs.tensor_cores import CODES_PANEL, CodesContraction
from flashmem.target.kernel_configs.workload import TF32, Workload

NARROWEST = 8
"""Columns of the narrowest panel that a budget may require: rows of packed codes of 4 bits are whole, and loads are vectors."""


def tile_for(
    context: LoweringContext,
    group: FusionGroup,
    workload: Workload,
    run: int,
    *,
    packed: bool = True,
    given: Contraction | None = None,
    winograd: bool = False,
) -> ContractionTile:
    """The contraction tile: config `given`, or the one for `workload`, cut to the matrix, with the types of its operands.

    `run`: steps of depth that are read contiguously. `winograd`: as in `compiler.selection.selector.KernelRequest`.
    """
    node, weights = group.main, workload.weights
    scalar, activation = REGISTER[node.outputs[0].dtype], context.stored(node.input(0))
    floats = scalar == "float" and activation in ("float", "half") and weights in ("float32", "float16")
    plain = None if floats else context.descriptor.tile.config(workload.family)
    config = given or plain or choice(context, group, workload, packed=packed, winograd=winograd)
    if workload.storage != TF32 and (activation != "half" or weights != "float16"):
        config = config.in_float()
    if isinstance(config, PlainContraction) and not packed:
        config = replace(config, panel_columns=0)
    config = config.cut(workload)
    staged = config.staged_depth
    vectors = context.descriptor.code.vector_loads and floats and not staged and run % 4 == 0
    offsets = 4 * max(workload.depth * workload.columns, group.main.input(0).size)  # in bytes, of 32 bits
    return ContractionTile(
        config, texture=packed and context.memory_path == "texture", weights=weights, scalar=scalar, activation=activation,
        stored=context.stored(group.output), aligned=workload.depth % 4 == 0, aligned_columns=workload.columns % 4 == 0,
        whole=bool(staged) and run % staged == 0,
        looped=context.descriptor.kind == "cpu" and not staged and config.rows * config.columns > config.vector,
        depth_vector=4 if vectors and offsets < MOST_OFFSET else 1,
    )  # fmt: skip


def choice(
    context: LoweringContext, group: FusionGroup, workload: Workload, *, packed: bool = True, winograd: bool = False
) -> Contraction:
    """The config for `workload`, selected once for each weight, because all patches read the weight in one packing."""
    key = (group.main.input(1), replace(workload, rows=0), winograd)
    if not packed or key not in context.configs:
        widest = context.slicing.widest(workload.depth * (2 if workload.storage == "float16" else 4)) if packed else None
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


def with_binding(tile: ContractionTile, binding: WeightBinding) -> ContractionTile:
    """`tile` with the zero points and scales of its operands."""
    return replace(
        tile,
        zero=binding.zero,
        scale=binding.scale,
        weight_zero=binding.weight_zero,
        weight_scale=binding.weight_scale,
        weight_minimum=binding.weight_minimum,
        block_depth=binding.block,
    )


def pieces_of(context: LoweringContext, tile: ContractionTile) -> int:
    """`ContractionTile.pieces`: a half has 11 bits, as TF32, a float 24; bfloat16 has 8."""
    if not isinstance(tile.config, CodesContraction):
        return 0
    return 2 if context.tf32 or tile.activation == "half" else 3


_SUMMED_COLUMNS, _MOST_STRANDS = 64, 4
"""Floats of sums that hide the latency of a multiply-add: four steps of two units of eight floats."""


def with_unscaled_sums(tile: ContractionTile, descriptor: DeviceDescriptor) -> ContractionTile:
    """`tile`, of one row of a CPU, with products of floats and quantised weights summed before they are scaled, where it has
    such.
    """
    floats = tile.scalar == "float" and tile.activation in ("float", "half") and tile.zero is tile.scale is None
    if not (floats and tile.integers and tile.weight_scale is not None and not tile.k_block):
        return tile
    in_words = tile.nibbles and not tile.texture and tile.vector == tile.panel == PANEL
    words = descriptor.vector_floats if in_words else 0
    return replace(tile, words=words, strands=1 if words else max(1, min(_MOST_STRANDS, _SUMMED_COLUMNS // tile.columns)))


def quantised_config(context: LoweringContext, workload: Workload, binding: WeightBinding) -> tuple[Contraction | None, int]:
    """The config by which a GPU multiplies floats by quantised weights, if it has one, and the width of packed panels, if its
    block spans several.

    Panels are those of the plain config for every number of rows, because all shapes of a model share its packed weights. For
    few rows, work-items share the depth of a panel; for few and more, tensor cores multiply codes. On devices without them, and
    for other blocks, the config with a K-block that is fastest for floats dequantises weights once for a block of rows.
    """
    scaled = binding.weight_scale is not None and binding.zero is binding.scale is None
    if workload.family != "matmul" or workload.storage not in CODES or not scaled:
        return None, 0
    descriptor = context.descriptor
    listed = descriptor.configs_of(workload.family)
    panel = descriptor.tile.config(workload.family).cut(workload).panel
    rivals = [each for each in listed if _multiplies(context, each, workload, binding, panel)]
    if rivals:
        times = measured_seconds(descriptor, workload, rivals)
        few = next((each for each in rivals if isinstance(each, SlicedContraction)), None)
        if not times and few is not None:
            return few, 0
        times = times or estimates(descriptor, workload, rivals)
        fastest = min(times, key=lambda each: times[each])
        assert isinstance(fastest, Contraction)
        return fastest, 0 if isinstance(fastest, SlicedContraction) else panel
    staged = [each for each in listed if isinstance(each, StagedContraction) and each.panel % panel == 0 and each.split_k == 1]
    times = seconds(descriptor, replace(workload, storage="float32")) if staged else {}
    known = [each for each in staged if each in times]
    return (min(known, key=lambda each: times[each]), panel) if known else (None, 0)


def _multiplies(context: LoweringContext, config: KernelConfig, workload: Workload, binding: WeightBinding, panel: int) -> bool:
    """Whether `config` is for quantised weights alone, and can multiply these: no step of it may span two blocks."""
    if isinstance(config, SlicedContraction):
        return config.fits(workload) and binding.block % config.steps == 0
    if not isinstance(config, CodesContraction) or not config.fits(workload) or panel != CODES_PANEL:
        return False
    by_column = bool(binding.block) == bool(binding.by_block)  # not one scale for all columns of a block
    return by_column and binding.block % config.step == 0 and not (context.selector.limited and config.split_k > 1)
