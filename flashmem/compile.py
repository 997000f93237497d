"""`flashmem.compile`: compiles an ONNX model to a bundle, for one device and one memory budget.

docs/reference/internals/architecture.md shows the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flashmem.base.errors import BudgetError, UserError
from flashmem.base.types import MemoryPath, Optimize, Precision, Quantize, StatePrecision, States, TransferMode
from flashmem.bundle.bundle import Bundle, ProgramCode, ShapeVariant
from flashmem.bundle.cache import find_or_make
from flashmem.bundle.language import Language
from flashmem.bundle.shape_variants import Shapes, shapes_text
from flashmem.bundle.writer import BundleWriter
from flashmem.compilation import DATA_FILES, Compilation, read_compilation, states_of
from flashmem.compiler.adaptive.pipeline import Pipeline
from flashmem.compiler.adaptive.plan_graph import plan_graph, refusal, with_layouts
from flashmem.compiler.adaptive.prompt_runs import with_longer_run
from flashmem.compiler.frontend.external_data import model_files
from flashmem.compiler.frontend.gguf.reader import converted
from flashmem.compiler.frontend.gguf.weights import matrix, sketched
from flashmem.compiler.frontend.language.candidates import check_batch, with_candidates
from flashmem.compiler.frontend.language.folder import read_folder
from flashmem.compiler.frontend.language.model import Rewrite, unchanged
from flashmem.compiler.frontend.mapped_file import load_mapped
from flashmem.compiler.frontend.quantize import quantised
from flashmem.compiler.frontend.read_graph import import_graph, read_graph
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.lowering.instruction_sets import for_other_instruction_sets
from flashmem.compiler.lowering.program import (
    NOTHING_RESERVED,
    Generated,
    Reserved,
    sharing_weights,
    stored_by,
    write_constants,
    write_weights,
)
from flashmem.compiler.lowering.steady import with_steady
from flashmem.compiler.memory.allocations import within_allocations
from flashmem.compiler.options import Options
from flashmem.compiler.passes.pipeline import check_dump_folder, dump_graph
from flashmem.compiler.passes.quantised_caches import quantised_states
from flashmem.compiler.selection.selector import KernelSelector
from flashmem.compiler.weights.sharing import NOTHING_STORED
from flashmem.planning.carried_instance import KEY as CARRIED
from flashmem.planning.carried_instance import carried
from flashmem.planning.planner import planned_together, planning_instance
from flashmem.program.program import Program
from flashmem.runtime.kernels.ahead_of_time import BuildRequest, KernelBuilder
from flashmem.runtime.kernels.ahead_of_time import with_binaries as carrying
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import Objective, OverlapPlan, Strategy, Units

if TYPE_CHECKING:
    import onnx

Progress = Callable[[str, float], None]


def compile(
    model: str | Path | bytes | onnx.ModelProto,
    output: str | Path | None = None,
    *,
    device: str = "auto",
    budget: int | str | None = None,
    m_peak: int | str | None = None,
    host_budget: int | str | None = None,
    lambda_: float | None = None,
    chunk: int | str | None = None,
    precision: Precision = "fp32",
    state_precision: StatePrecision | None = None,
    shapes: Shapes | Sequence[Shapes] | None = None,
    states: States | None = None,
    constants: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    batch: int | None = None,
    quantize: Quantize | None = None,
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
    dump_passes: str | Path | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Compile `model` into a bundle that runs within `budget` bytes on `device`.

    Args:
        model: an ONNX file, its bytes or an `onnx.ModelProto` (both with all weights inside); or a language model, whose shapes
            and states are known: a GGUF file, or a folder of onnxruntime-genai, optimum or transformers.js.
        output: the bundle's folder (`model.flashmem`). None keeps it in the user's cache, where an equal call finds it again.
            If the cache cannot be written, it is kept until the process ends, with a warning.
        device: "auto", part of the name of a local device, or the name or file of a descriptor.
        budget: most bytes that flashmem may hold: on a device with memory of its own there, else in all; None for no limit.
        m_peak: most bytes in flight in addition to W (FlashMem §3.1), for planning with the paper's parameters.
        host_budget: the host budget that sessions will have, for a device with memory of its own: what stays there and in
            pinned host memory is then chosen together.
        lambda_: weighs latency (0) against memory (1); in the paper's objective, loading distance against W. The default is 0,
            or the paper's 0.9 for objective "paper".
        chunk: S, the unit of transfer; by default at most a quarter of what the median launch can carry.
        precision: the stored type of weights and activations; sums are fp32. "tf32": they are stored in fp32, and NVIDIA's
            tensor cores round the operands of products with weights and of convolutions to 10 bits of mantissa.
        state_precision: the stored type of states, by default fp16 for a GGUF file, and `precision` for others. "int8": caches
            of keys and values in 8 bits, with a float32 scale for each row of a head, and other states in half.
        shapes: sizes for open dimensions, by input. Or several of these, for a bundle with one shape variant each and common
            weights. A session then runs the variant whose shapes its inputs have.
        states: inputs that the next run reads as outputs of this one, input name to output name; "auto": all pairs that are
            named past and present. A session keeps them on the device, and neither takes nor returns them.
        constants: values of inputs that never change, numbers or arrays by name. The bundle has no such inputs, and branches on
            them are folded.
        max_length: of a language model: tokens that its cache holds, by default 2,048 or the model's context.
        batch: of a language model: requests that `BatchGenerator` answers at a time, each with a cache of its own; 1 by
            default, for `Generator`.
        quantize: store float32 weights of products and tables as integers with scales: "int4" or "int8". `Bundle.meta` has the
            error of each as `quantised` (`flashmem.compiler.frontend.quantize`).
        preload: weights that must be resident from the start.
        memory_path: the memory objects that kernels read weights from; "auto" selects the device's first path.
        mode: the transfer mode of weights; "auto" selects the device's first mode on that path.
        objective: "first" answer (the default), "steady" (later runs; the default with states), or "paper".
        strategy: "stream" plans; the others are the simpler ones of `planning.baselines`, for comparison.
        unfusion: split fusion groups where that improves the plan (FlashMem §4.3).
        mu: weight of loading distance in the ranking of fusion groups for a split.
        units: of the paper's objective: "share" of all chunks and all launches, or chunks and launches as "printed".
        alpha: the least gain in load capacity, as a fraction, for which a fusion group is split.
        build: if the device is local, compile the kernels into the program cache, so that the first run compiles nothing.
        with_binaries: also store the compiled kernels in the bundle, for exactly equal devices and drivers.
        optimize: select kernels for the first answer ("cold": building and loading count too) or for later ones ("steady").
        dump_passes: a folder for the graph as text, as imported and after each pass of the compiler; for several shape
            variants, with one subfolder each.
        progress: called with a stage and the fraction done.

    Raises:
        UserError: the model or an argument must change; a BudgetError if the budget is too small.
        RunError: the device's driver refuses a kernel.
    """
    if with_binaries and not build:
        raise UserError("a bundle cannot carry kernels that are not built; leave out either --no-build or --with-binaries")
    progress = progress or (lambda stage, fraction: None)
    compilation = read_compilation(
        model,
        device=device,
        budget=budget,
        m_peak=m_peak,
        host_budget=host_budget,
        lambda_=lambda_,
        chunk=chunk,
        precision=precision,
        state_precision=state_precision,
        shapes=shapes,
        states=states,
        constants=constants,
        max_length=max_length,
        batch=batch,
        quantize=quantize,
        preload=preload,
        memory_path=memory_path,
        mode=mode,
        objective=objective,
        strategy=strategy,
        unfusion=unfusion,
        mu=mu,
        alpha=alpha,
        units=units,
        optimize=optimize,
    )
    if dump_passes is not None:
        with compilation.in_a_file() as filed, _as_onnx(filed) as source:
            _dump_passes(source, Path(dump_passes), filed)
    with KernelBuilder(device, lambda fraction: progress("build kernels", fraction)) as kernels:

        def make(place: Path) -> Bundle:
            hint = "; a cache of fewer tokens (--max-length) needs less" if compilation.is_language else ""
            with compilation.in_a_file() as filed, _as_onnx(filed) as source, _adding(after=hint):
                if filed is not compilation:
                    source = replace(source, meta={**source.meta, "model_path": ""})
                read = _read(source, filed, progress)
                return _compile(filed, source, read, place, progress, kernels if build else None)

        bundle = make(Path(output)) if output is not None else find_or_make(compilation.name, make, compilation.describes)
        if not build:
            return bundle
        built = kernels.finish(bundle)
        return carrying(bundle, built) if with_binaries else bundle


@dataclass(frozen=True)
class _Source:
    """The model as an ONNX file, which `rewrite` changes when it is read, and what else its bundle needs.

    `files`: those whose change makes the bundle outdated, besides the model. `meta` goes to the bundle's metadata.
    """

    path: Path
    language: bytes = b""
    rewrite: Rewrite = unchanged
    files: tuple[Path, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    def extend(self, graph: Graph) -> Graph:
        """`graph`, as imported, with what only the graphs of language models have. Raises UserError."""
        if not self.language:
            return graph
        check_batch(graph)
        return with_candidates(graph)


@contextmanager
def _as_onnx(compilation: Compilation, *, sketch: bool = False) -> Iterator[_Source]:
    """The model as an ONNX file, as long as the body runs. `sketch`: with weights of zeros, if it is not one already."""
    model = compilation.model
    if compilation.kind == "gguf":
        with converted(model, compilation.max_length, sketched if sketch else matrix, compilation.batch) as language:
            yield _Source(language.path, language.language)
        return
    source = _Source(model)
    if compilation.kind == "folder":
        language = read_folder(model, compilation.max_length, compilation.batch)
        source = _Source(language.path, language.language, language.rewrite, language.files)
    source = replace(source, files=(*source.files, *model_files(load_mapped(source.path), source.path)))
    if compilation.quantize is None:
        yield source
        return
    with quantised(source.path, compilation.quantize) as made:
        meta = {"quantize": compilation.quantize, "quantised": [asdict(each) for each in made.weights]}
        yield replace(source, path=made.path, meta=meta)


def _dump_passes(source: _Source, folder: Path, compilation: Compilation) -> None:
    """Write the graph of each variant before and after each pass.

    Imports the model for this alone, so that it works even when the bundle is in the cache.
    """
    check_dump_folder(folder)
    variants = compilation.variants
    if compilation.is_language:
        variants = _read(source, compilation, lambda stage, fraction: None).variants
    for number, options in enumerate(variants, start=1):
        place = folder if len(variants) == 1 else folder / f"variant-{number}"
        check_dump_folder(place)
        dump_graph(import_graph(source.path, options, source.rewrite, source.extend), place)


def compile_rehearsal(compilation: Compilation, output: Path, progress: Progress) -> tuple[Bundle, int]:
    """A bundle with weights of zeros, which takes little time and disk space, and the smallest budget of its model in bytes.

    Raises:
        UserError: as `compile`.
    """
    if compilation.quantize is not None:
        raise UserError("--estimate reads no weights, and --quantize needs them; leave out one of them")
    with _as_onnx(compilation, sketch=True) as source:
        read = _read(source, compilation, progress)
        made = _compile(compilation, source, read, output, progress, None, with_weights=False)
        least = read.first(len(compilation.variants))
        pairs = zip(least.graphs, least.variants, strict=True)
        return made, max(refusal(graph, options, least=least.least).smallest_bytes for graph, options in pairs)


@dataclass(frozen=True)
class _Graphs:
    """The variants of a model, the graph of each, and what all of them reserve."""

    variants: tuple[Options, ...]
    graphs: Sequence[Graph]
    least: Reserved

    def first(self, count: int) -> _Graphs:
        """The first `count` variants."""
        if count == len(self.variants):
            return self
        variants, graphs = self.variants[:count], self.graphs[:count]
        return _Graphs(variants, graphs, _reserved(graphs, variants))


def _read(source: _Source, compilation: Compilation, progress: Progress) -> _Graphs:
    """Read the graph of each variant; of a language model perhaps one more. Raises UserError like `_read_graphs`."""
    progress("import", 0.0)
    variants = compilation.variants
    graphs = _read_graphs(source, variants)
    if compilation.is_language and compilation.batch == 1:

        def read(options: Options) -> Graph:
            return read_graph(source.path, options, source.rewrite, source.extend)

        longest = Language.from_json(source.language).max_length
        variants, graphs = with_longer_run(variants, graphs, longest, read)
    return _Graphs(variants, graphs, _reserved(graphs, variants))


def _compile(
    compilation: Compilation,
    source: _Source,
    read: _Graphs,
    output: Path,
    progress: Progress,
    kernels: KernelBuilder | None,
    *,
    with_weights: bool = True,
) -> Bundle:
    """Compile all shape variants, whose graphs were `read`, into one bundle. `source` has the ONNX file of the model.

    `kernels` are built while plans are made, and weights are packed and written. A variant that is not among those of
    `compilation` is left out if the budget is too small for it.
    """
    model, options = compilation.model, compilation.variants[0]
    data = states_of(file for file in source.files if file.resolve() != model.resolve())

    def begin(generated: Generated, plan: OverlapPlan | None = None) -> None:
        if kernels is not None:
            request = BuildRequest(
                generated.program, generated.source, options.descriptor, options.limits.strategy, options.mode, plan
            )
            kernels.begin(request)

    try:
        made, elsewhere = _planned(read, progress, begin)
    except BudgetError:
        least = read.first(len(compilation.variants))
        if least is read:
            raise
        read = least
        made, elsewhere = _planned(read, progress, begin)
    joined = dict(zip(made, sharing_weights([generated for generated, _ in made.values()]), strict=True))
    nbytes = joined[0].program.weights_bytes

    def packed(name: str, _: int) -> None:
        progress("pack weights", bundle.size / nbytes)
        if kernels is not None:
            kernels.poll()

    with BundleWriter(output) as bundle:
        if with_weights:
            write_weights(list(joined.values()), bundle, packed)
        else:
            bundle.leave_empty(joined[0].program.constants_offset)
            write_constants([*joined.values()][-1], bundle)
        bundle.commit_all(
            [_variant(joined[index], made[index][1], each, elsewhere[index]) for index, each in enumerate(read.variants)],
            options.descriptor.portable,
            {**_about(model, options), **_states_in_half(read.graphs[0]), **source.meta, DATA_FILES: data},
            source.language,
        )
    return Bundle.open(output)


def _planned(
    read: _Graphs, progress: Progress, begin: Callable[[Generated, OverlapPlan | None], None]
) -> tuple[dict[int, tuple[Generated, OverlapPlan]], dict[int, dict[str, Generated]]]:
    """The program and the plan of each variant, and its programs for other instruction sets, by the variant's number.

    `begin` is called with each program, first without its plan. Raises BudgetError: a variant does not fit the budget.
    """
    graphs, variants, earlier = read.graphs, read.variants, NOTHING_STORED
    options = variants[0]
    elsewhere: dict[int, dict[str, Generated]] = {}
    made: dict[int, tuple[Generated, OverlapPlan]] = {}
    for index in largest_first(graphs):
        progress("plan", len(made) / len(graphs))
        try:
            with _adding(before=_among(variants, index)):
                generated, plan = plan_graph(
                    graphs[index], variants[index], final=lambda each: begin(each, None), earlier=earlier, least=read.least
                )
        except BudgetError as refused:
            raise _most_needed(
                refused, read, variants, [each for each in range(len(graphs)) if each not in (*made, index)]
            ) from refused
        elsewhere[index] = for_other_instruction_sets(generated, options.descriptor.instruction_set)
        generated = with_steady(generated)
        begin(generated, plan)
        plan = with_layouts(generated.program, plan, options.descriptor.modes[generated.program.memory_path])
        made[index] = generated, within_allocations(generated.program, plan, options.descriptor, options.mode)
        if len(graphs) > 1:
            earlier = stored_by(generated, earlier)
    return _keeping_the_same(made, options) if len(graphs) > 1 else made, elsewhere


def _keeping_the_same(
    made: Mapping[int, tuple[Generated, OverlapPlan]], options: Options
) -> dict[int, tuple[Generated, OverlapPlan]]:
    """The variants, planned together where that lets a session change between them without loading weights again."""
    descriptor, mode = options.descriptor, options.mode
    programs = [(generated.program, plan) for generated, plan in made.values()]
    plans = planned_together(programs, descriptor, mode, options.limits)
    found = {}
    for (index, (generated, own)), plan in zip(made.items(), plans, strict=True):
        program = generated.program
        if plan is not own:
            plan = with_layouts(program, plan, descriptor.modes[program.memory_path])
            plan = within_allocations(program, plan, descriptor, mode)
        found[index] = generated, plan
    return found


def _among(variants: Sequence[Options], index: int) -> str:
    """The beginning of a message about one of several variants."""
    return f"for the shapes {shapes_text(variants[index].shapes)}: " if len(variants) > 1 else ""


def _most_needed(refused: BudgetError, read: _Graphs, variants: Sequence[Options], others: Sequence[int]) -> BudgetError:
    """Of one variant's refusal and those of `others`, that with the largest need: all variants need it."""
    for index in others:
        needed = refusal(read.graphs[index], variants[index], least=read.least).smallest_bytes
        if needed > refused.smallest_bytes:
            try:
                with _adding(before=_among(variants, index)):
                    plan_graph(read.graphs[index], variants[index], least=read.least)
            except BudgetError as larger:
                refused = larger
    return refused


@contextmanager
def _adding(*, before: str = "", after: str = "") -> Iterator[None]:
    """Add text to the message of a BudgetError."""
    try:
        yield
    except BudgetError as error:
        raise BudgetError(
            f"{before}{error}{after}",
            smallest_bytes=error.smallest_bytes,
            binding=error.binding,
            without_patches=error.without_patches,
        ) from error


def _read_graphs(source: _Source, variants: Sequence[Options]) -> list[Graph]:
    """The graph of each variant. Raises UserError like `read_graph`, and if two variants have the same shapes."""
    graphs: list[Graph] = []
    seen: list[Shapes] = []
    for options in variants:
        graphs.append(read_graph(source.path, options, source.rewrite, source.extend))
        shapes = {port.name: port.value.shape for port in graphs[-1].inputs}
        if shapes in seen:
            raise UserError(f"two of the requested variants are {shapes_text(shapes)}; leave one out")
        if quantised_states(graphs[-1]) != quantised_states(graphs[0]):
            raise UserError(
                "one of the requested variants can store other states in int8 than another, and variants share their states; "
                "use --state-precision fp16"
            )
        for state, _ in graphs[0].states:
            if seen and shapes[state] != seen[0][state]:
                raise UserError(
                    f"the state {state!r} has the shapes {seen[0][state]} and {shapes[state]} in two of the requested "
                    f"variants, which share their states; give it one shape"
                )
        seen.append(shapes)
    return graphs


def _reserved(graphs: Sequence[Graph], variants: Sequence[Options]) -> Reserved:
    """What all variants of a model with states reserve: the most of each. So a session alternates in the same memory."""
    if len(graphs) == 1 or not graphs[0].states:
        return NOTHING_RESERVED
    earlier, arenas, constants = NOTHING_STORED, list[int](), list[int]()
    for index in largest_first(graphs):
        options = variants[index]
        selector = KernelSelector(options.descriptor, options.optimize, limited=options.limits.budget is not None)
        made = Pipeline(graphs[index], options, selector, earlier=earlier).generate(frozenset())
        arenas.append(made.program.arena_bytes)
        constants.append(made.constants.nbytes)
        earlier = stored_by(made, earlier)
    return Reserved(max(arenas), max(constants))


def largest_first(graphs: Sequence[Graph]) -> list[int]:
    """The indices of a model's variants, the largest inputs first: that variant determines the layout of the weights."""

    def elements(index: int) -> int:
        return sum(port.value.size for port in graphs[index].inputs)

    return sorted(range(len(graphs)), key=lambda index: (-elements(index), index))


def _variant(generated: Generated, plan: OverlapPlan, options: Options, elsewhere: Mapping[str, Generated]) -> ShapeVariant:
    """One shape variant of the bundle. `elsewhere`: the program for other instruction sets."""
    program = generated.program
    codes = {name: ProgramCode(program.with_launches_of(each.program), each.source) for name, each in elsewhere.items()}
    own = {
        "shapes": {name: list(shape) for name, shape in options.shapes.items()},
        CARRIED: carried(_posed(program, plan, options)),
    }
    return ShapeVariant(program, plan, generated.source, own, codes)


def _posed(program: Program, plan: OverlapPlan, options: Options) -> Instance:
    """The overlap-plan problem that `plan` solves, stored so that the bundle can be planned again for other budgets."""
    return planning_instance(program, options.descriptor, options.mode, replace(options.limits, chunk=plan.chunk_bytes))


def _states_in_half(graph: Graph) -> dict[str, object]:
    """With states in int8: that, and the names of those that are stored in half all the same."""
    if graph.state_precision != "int8":
        return {}
    quantised = quantised_states(graph)
    return {"state_precision": "int8", "states_in_half": [name for name, _ in graph.states if name not in quantised]}


def _about(model: Path, options: Options) -> dict[str, object]:
    """The origin of the bundle for its manifest, common to all variants."""
    return {
        "model": model.stem,
        "model_path": str(model.resolve()),
        "budget_bytes": options.limits.budget,
        "mode": options.mode,
        "limits": asdict(options.limits),
        "constants": dict(options.constants),
    }
