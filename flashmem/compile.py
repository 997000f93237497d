"""The offline pipeline: model.onnx in, bundle out (docs/architecture.md draws it)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import flashmem
from flashmem.allocations import within_allocations
from flashmem.banding import fitting_bands
from flashmem.bundle import Bundle, BundleWriter
from flashmem.bundle_cache import find_or_make
from flashmem.codegen.choices import Choices
from flashmem.codegen.program import Generated, generate
from flashmem.codegen.slicing import FINEST, Slicing
from flashmem.codegen.steady import with_steady
from flashmem.codegen.tuned import digest
from flashmem.device import TransferMode
from flashmem.errors import BudgetError, MissingFileError, UserError
from flashmem.granularity import first_attempt
from flashmem.graph.fusion import Layer, fuse
from flashmem.graph.ir import Graph
from flashmem.graph.onnx_external import model_files
from flashmem.graph.onnx_import import collect_unsupported, import_model
from flashmem.graph.onnx_mapped import load_mapped
from flashmem.graph.operators import why_unsupported
from flashmem.graph.passes import prepare
from flashmem.ordering import in_lowest_order
from flashmem.planning.carried import KEY as CARRIED
from flashmem.planning.carried import carried
from flashmem.planning.limits import read_limits
from flashmem.planning.memory_layout import lay_out_pools
from flashmem.planning.plan import Objective, OverlapPlan, Strategy, Units
from flashmem.planning.planner import completed, make_plan, plan_problem, planning_problem
from flashmem.planning.problem import Problem
from flashmem.program import LaunchOrder, MemoryPath, Program
from flashmem.request import Optimize, Options, resolve
from flashmem.runtime.kernel_builder import KernelBuilder, Wish
from flashmem.runtime.kernel_builder import with_binaries as carrying
from flashmem.unfusion import Cuts, Pipeline, may_refine, refine

Progress = Callable[[str, float], None]
Watch = Callable[[str], AbstractContextManager[None]]


def compile(
    model: str | Path,
    output: str | Path | None = None,
    *,
    device: str = "auto",
    budget: int | str | None = None,
    m_peak: int | str | None = None,
    lambda_: float | None = None,
    chunk: int | str | None = None,
    precision: Literal["fp32", "fp16"] = "fp32",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    preload: Sequence[str] = (),
    memory_path: MemoryPath | Literal["auto"] = "auto",
    mode: TransferMode | Literal["auto"] = "auto",
    objective: Objective | Literal["auto"] = "auto",
    strategy: Strategy = "stream",
    unfusion: bool = True,
    mu: float = 0.1,
    alpha: float = 0.1,
    units: Units = "share",
    build: bool = True,
    with_binaries: bool = False,
    optimize: Optimize = "cold",
    progress: Progress | None = None,
) -> Bundle:
    """Compile `model` into a bundle that runs within `budget` bytes on `device`.

    Args:
        model: an ONNX file.
        output: the bundle's folder (`model.flashmem`); None keeps it in the user's cache, where an equal call finds it again
            (where that cannot be written: until the process ends, with a warning).
        device: "auto", part of the name of a device that is here, or the name or file of a descriptor.
        budget: most bytes flashmem may hold on the device and in host staging together; None for no limit.
        m_peak: most bytes in flight beside W (FlashMem §3.1), for those who plan with the paper's parameters.
        lambda_: weighs latency (0) against memory (1), in the paper's objective loading distance against W; by default 0, or
            the paper's 0.9.
        chunk: S, the unit of transfer; by default a size of which the median layer carries four.
        precision: what weights and activations are stored in; sums are fp32.
        shapes: sizes for open dimensions, by input.
        preload: weights that must be resident from the start.
        memory_path: where weights are read from; "auto" takes the device's first.
        mode: how weights travel; "auto" takes the first the device has on that path.
        objective: "first" answer (the default), "steady" (later runs), or "paper".
        strategy: "stream" plans; the others are the simpler ones of `planning.baselines`, to compare with.
        unfusion: split fused layers where that makes the plan better (FlashMem §4.3).
        mu: weight of loading distance when fused layers are ranked for a split.
        units: of the paper's objective: "share" of all chunks and all layers, or chunks and layers as "printed".
        alpha: the least gain in load capacity, as a share, for which a fused layer is split.
        build: if the device is here, compile the kernels into the program cache, so that the first run compiles nothing.
        with_binaries: and keep them in the bundle, too, for devices and drivers that are exactly the same.
        optimize: choose kernels for the first answer ("cold": building and loading count too) or for later ones ("steady").
        progress: called with a stage and the fraction done.

    Raises:
        UserError: anything in the model or the arguments that has to be changed, a budget too small among it.
        RunError: the device's driver refuses a kernel.
    """
    if with_binaries and not build:
        raise UserError("a bundle cannot carry kernels that are not built; leave out either --no-build or --with-binaries")
    progress = progress or (lambda stage, fraction: None)
    model = Path(model)
    if not model.is_file():
        raise MissingFileError(f"model {model} does not exist; name an ONNX file")
    limits = read_limits(
        budget=budget,
        m_peak=m_peak,
        chunk=chunk,
        lambda_=lambda_,
        objective=objective,
        preload=preload,
        strategy=strategy,
        unfusion=unfusion,
        mu=mu,
        alpha=alpha,
        units=units,
    )
    options = resolve(
        limits, device=device, memory_path=memory_path, mode=mode, precision=precision, shapes=shapes, optimize=optimize
    )
    with KernelBuilder(device, lambda fraction: progress("build kernels", fraction)) as kernels:

        def make(place: Path) -> Bundle:
            return _compile(model, place, options, progress, kernels if build else None)

        bundle = make(Path(output)) if output is not None else find_or_make(f"{model.stem}-{_key(model, options)}", make)
        if not build:
            return bundle
        built = kernels.finish(bundle)
    return carrying(bundle, built) if with_binaries else bundle


def _compile(model: Path, output: Path, options: Options, progress: Progress, kernels: KernelBuilder | None) -> Bundle:
    """`kernels` are built while the plan is made, weights are packed and written."""

    def begin(generated: Generated, plan: OverlapPlan | None = None) -> None:
        if kernels is not None:
            wish = Wish(generated.program, generated.source, options.descriptor, options.limits.strategy, options.mode, plan)
            kernels.begin(wish)

    def packed(name: str, nbytes: int) -> None:
        progress("pack weights", bundle.size / generated.program.weights_bytes)
        if kernels is not None:
            kernels.poll()

    progress("import", 0.0)
    graph = read_graph(model, options)
    progress("plan", 0.0)
    generated, plan = plan_graph(graph, options, final=begin)
    generated = with_steady(generated)
    begin(generated, plan)
    plan = with_layouts(generated.program, plan, options.descriptor.modes[generated.program.memory_path])
    plan = within_allocations(generated.program, plan, options.descriptor, options.mode)
    with BundleWriter(output) as bundle:
        generated.weights.write(bundle, packed)
        about = {**_about(model, options), CARRIED: carried(_posed(generated.program, plan, options))}
        bundle.commit(generated.program, generated.source, plan, options.descriptor.portable, about)
    return Bundle.open(output)


def _posed(program: Program, plan: OverlapPlan, options: Options) -> Problem:
    """The problem that `plan` is of, so that the bundle can be planned again for other budgets."""
    return planning_problem(program, options.descriptor, options.mode, replace(options.limits, chunk=plan.chunk_bytes))


def read_graph(model: Path, options: Options) -> Graph:
    """The graph of `model` as layers are fused from it. No weight is read.

    Raises:
        UserError: the model cannot be read, or not run.
    """
    graph = import_model(model, options.shapes, why_unsupported)
    collect_unsupported(graph, why_unsupported)
    return prepare(graph)


def plan_graph(
    graph: Graph,
    options: Options,
    watch: Watch = lambda step: nullcontext(),
    final: Callable[[Generated], None] = lambda generated: None,
    *,
    lowest_order: bool = True,
    bands: bool = True,
) -> tuple[Generated, OverlapPlan]:
    """The middle of the pipeline: layers fused, the program, and its checked plan without layouts.

    Slices are as large as the limits allow and the clock likes; layers are split where adaptive unfusion makes the plan better.
    Under a budget that is too small for that, chains of operators are computed in bands.

    `watch(step)` is entered for each "fuse", "generate" and "plan_and_check", as often as they are made, and for "bands".
    `final` is called with the program before it is planned, where no plan can ask for another: without limits on memory, and
    without unfusion. `lowest_order`, `bands`: put launches into the order that holds the least, and compute in bands.

    Raises:
        UserError: the limits have to be changed; a BudgetError names the smallest that work.
    """
    try:
        return _plan(graph, options, watch, final, lowest_order=lowest_order)
    except BudgetError as refused:
        if options.limits.budget is None or not bands:
            raise
        banded, note = fitting_bands(graph, options, refused, lambda banded: _plan(banded, options, watch, finest=True), watch)
    generated, plan = _plan(banded, options, watch)
    return generated, replace(plan, notes=(*plan.notes, note))


def _plan(
    graph: Graph,
    options: Options,
    watch: Watch,
    final: Callable[[Generated], None] = lambda generated: None,
    *,
    finest: bool = False,
    lowest_order: bool = True,
) -> tuple[Generated, OverlapPlan]:
    """The layers of `graph` as they are, with the slices that are best under the limits; if `finest`, with the smallest ones,
    and no layer split. `lowest_order`: see `plan_graph`.
    """
    descriptor, limits, mode = options.descriptor, options.limits, options.mode
    limited = limits.budget is not None or limits.m_peak is not None
    choices = Choices(descriptor, options.optimize, limited=limited)
    only_one = not limited and not may_refine(limits, mode)

    def write(layers: Sequence[Layer], order: LaunchOrder | None, slicing: Slicing) -> Generated:
        slicing = replace(slicing, later=options.optimize == "steady")
        made = generate(graph, layers, descriptor, precision=options.precision, slicing=slicing, choices=choices)

        def again() -> Generated | None:
            if not choices.later_differ() and all(len(parts) == 1 for parts in made.cuts.values()):
                return None
            later = choices.beside()
            return generate(
                graph, layers, descriptor, precision=options.precision, slicing=slicing, choices=later, cuts=made.cuts
            )

        return replace(made, program=replace(made.program, order=order), again=again)

    def program(cuts: Cuts, slicing: Slicing) -> Generated:
        with watch("fuse"):
            layers, order = fuse(graph, cuts), None
            if lowest_order:
                layers, order = in_lowest_order(graph, layers, half=options.precision == "fp16")
        with watch("generate"):
            made = write(layers, order, slicing)
            if choices.settle():
                made = write(layers, order, slicing)
        if only_one:
            final(made)
        return made

    def problem(program: Program) -> Problem:
        with watch("plan_and_check"):
            return planning_problem(program, descriptor, mode, limits)

    def plan(problem: Problem, program: Program) -> OverlapPlan:
        with watch("plan_and_check"):
            return plan_problem(problem, program, mode, limits, complete=False)

    def pipeline_for(slicing: Slicing) -> Pipeline:
        return Pipeline(lambda cuts: program(cuts, slicing), problem, plan)

    if finest:
        attempt = pipeline_for(FINEST).attempt(frozenset())
        return attempt.generated, attempt.plan
    pipeline, first = first_attempt(pipeline_for, limits)
    generated, made = refine(graph, pipeline, first, limits, mode)
    if limits.resolved_objective == "first":
        made = completed(problem(generated.program), made, generated.program, mode, limits)
    notes = (f"{' and '.join(graph.widened)} of the model computed in float32",) if graph.widened else ()
    return generated, replace(made, notes=(*made.notes, *notes))


def plan_program(program: Program, options: Options) -> OverlapPlan:
    """The overlap plan of a program as it is, with the layouts of every transfer mode that its memory path has."""
    plan = make_plan(program, options.descriptor, options.mode, options.limits)
    return with_layouts(program, plan, options.descriptor.modes[program.memory_path])


def with_layouts(program: Program, plan: OverlapPlan, modes: Sequence[TransferMode]) -> OverlapPlan:
    """`plan` with the layouts of `modes`."""
    return replace(plan, layouts=lay_out_pools(program.slices, plan, modes, page_bytes=program.page_bytes))


def _about(model: Path, options: Options) -> dict[str, object]:
    """What the bundle's manifest says of its origin."""
    return {
        "model": model.stem,
        "model_path": str(model.resolve()),
        "budget_bytes": options.limits.budget,
        "mode": options.mode,
        "limits": asdict(options.limits),
        "shapes": {name: list(shape) for name, shape in options.shapes.items()},
    }


def _key(model: Path, options: Options) -> str:
    """Hash of everything a bundle depends on; of the model's files, where they are, their sizes and times."""
    files = []
    for path in model_files(load_mapped(model), model):
        state = path.stat()
        files.append((str(path), state.st_size, state.st_mtime_ns))
    content = json.dumps(
        [flashmem.__version__, files, asdict(options), digest(options.descriptor)], sort_keys=True, default=str
    )
    return hashlib.sha256(content.encode()).hexdigest()[:16]
