"""`flashmem.compile`: compiles an ONNX model to a bundle, for one device and one memory budget.

docs/reference/internals/architecture.md shows the pipeline.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flashmem.base.errors import BudgetError, FlashmemWarning, UserError
from flashmem.base.garbage import collecting_seldom
from flashmem.bundle.bundle import Bundle, ProgramCode, ShapeVariant
from flashmem.bundle.cache import find_or_make, forget
from flashmem.bundle.language import WEIGHTS_KEY, Language
from flashmem.bundle.writer import BundleWriter
from flashmem.compilation import DATA_FILES, STORED, Compilation, read_compilation, states_of
from flashmem.compiler.adaptive.prompt_runs import with_longer_run
from flashmem.compiler.adaptive.shape_variants import Variants, adding, plan_variants, read_graphs
from flashmem.compiler.frontend.decoder.weights import matrix, sketched
from flashmem.compiler.frontend.decoder_files import converted
from flashmem.compiler.frontend.external_data import model_files
from flashmem.compiler.frontend.language.candidates import check_batch, with_candidates
from flashmem.compiler.frontend.language.folder import read_folder
from flashmem.compiler.frontend.language.model import Rewrite, unchanged
from flashmem.compiler.frontend.mapped_file import load_mapped
from flashmem.compiler.frontend.quantize import quantised
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.lowering.generated import Generated, write_constants, write_weights
from flashmem.compiler.options import Options, RefusedKernel
from flashmem.compiler.passes.quantised_caches import quantised_states
from flashmem.compiler.stages.dump import StageFolder
from flashmem.compiler.stages.pipeline import GroupedGraph
from flashmem.compiler.stages.planned import CompiledVariant
from flashmem.compiler.stages.reading import read_graph
from flashmem.compiler.stages.stages import IMPORT, LAY_OUT, PACK
from flashmem.planning.carried_instance import KEY as CARRIED
from flashmem.planning.carried_instance import carried
from flashmem.planning.planner import may_search, planning_instance
from flashmem.planning.search_process import SearchProcess
from flashmem.program.program import Program
from flashmem.request.description import keywords_of
from flashmem.request.limits import Limits
from flashmem.request.request import BundleRequest, CompileCall
from flashmem.runtime.kernels.ahead_of_time import BuildRequest, BuildResult, KernelBuilder
from flashmem.runtime.kernels.ahead_of_time import with_binaries as carrying
from flashmem.runtime.kernels.verdicts import Finding
from flashmem.schedule.instance import Instance
from flashmem.schedule.plan import OverlapPlan

Progress = Callable[[str, float], None]


@keywords_of(CompileCall)
@collecting_seldom()
def compile(call: CompileCall) -> Bundle:
    """Compile `model` into a bundle that runs within `budget` bytes on `device`.

    Raises:
        UserError: the model or an argument must change; a BudgetError if the budget is too small.
        RunError: the device's driver refuses a kernel.
    """
    if call.with_binaries and not call.build:
        raise UserError("a bundle cannot carry kernels that are not built; leave out either --no-build or --with-binaries")
    progress = call.progress or _no_progress
    compilation = read_compilation(call.model, call.given_as(BundleRequest))
    if call.dump_stages is not None:
        dump = StageFolder(call.dump_stages)
        with compilation.in_a_file() as filed, _as_onnx(filed) as source:
            _dump_stages(source, filed, dump)
    with KernelBuilder(call.device, lambda fraction: progress("build kernels", fraction)) as kernels:

        def find(refused: Mapping[str, Finding]) -> Bundle:
            asked = compilation.refusing(
                {name: RefusedKernel(each.wrong, each.options is not None) for name, each in refused.items()}
            )

            def make(place: Path) -> Bundle:
                hint = "; a cache of fewer tokens (--max-length) needs less" if compilation.is_language else ""
                with asked.in_a_file(place) as filed, _as_onnx(filed, beside=place) as source, adding(after=hint):
                    if filed is not asked:
                        source = replace(source, meta={**source.meta, "model_path": ""})
                    read = _read(source, filed, progress)
                    return _compile(filed, source, read, place, progress, kernels if call.build else None)

            return find_or_make(compilation.name, make, compilation.describes) if call.output is None else make(call.output)

        if not call.build:
            return find({})
        bundle, built = _find_right(find, kernels, compilation.variants[0].descriptor.name)
        if built is not None:
            _warn_of_miscompiled(built, bundle)
        return carrying(bundle, built) if call.with_binaries else bundle


MOST_ROUNDS = 3
"""How often a model is compiled again because kernels were found to be wrong: each time other configs are chosen for these."""


def _find_right(
    find: Callable[[Mapping[str, Finding]], Bundle], kernels: KernelBuilder, descriptor: str
) -> tuple[Bundle, BuildResult | None]:
    """The bundle that `find` makes without kernels that are wrong, as far as other configs give right ones; and what was built.

    `find` is called again for what its last bundle showed to be wrong.
    """
    refused: Mapping[str, Finding] = kernels.wrong(descriptor)
    bundle = find(refused)
    for _ in range(MOST_ROUNDS):
        built = kernels.finish(bundle, refused)
        if built is None or built.of_configs.keys() <= refused.keys():
            return bundle, built
        refused = {**refused, **built.of_configs}
        forget(bundle.files)  # if it is in the cache
        bundle = find(refused)
    return bundle, kernels.finish(bundle)


def _warn_of_miscompiled(built: BuildResult, bundle: Bundle) -> None:
    used = {name for each in bundle.variants for name in each.source.kernels}
    for name, finding in built.wrong.items():
        instead = "which is compiled without optimisation there" if name in used else "and another one is in its place"
        if finding.of_chain:
            instead = "and the kernels that it joins are in its place"
        warnings.warn(
            f"the driver of {built.device.name} miscompiles the kernel {name}, {instead}: {finding.wrong}",
            FlashmemWarning,
            stacklevel=3,
        )


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
def _as_onnx(compilation: Compilation, *, sketch: bool = False, beside: Path | None = None) -> Iterator[_Source]:
    """The model as an ONNX file, as long as the body runs. `sketch`: with weights of zeros, if it is not one already.

    A file that is written for this is on the disk of the bundle `beside`, or a temporary one.
    """
    model = compilation.model
    request = compilation.request
    if compilation.kind in STORED:
        read = sketched if sketch else matrix
        with converted(model, request.max_length, read, request.batch, beside=beside) as language:
            yield _Source(language.path, language.language, files=language.files, meta={WEIGHTS_KEY: language.key})
        return
    source = _Source(model)
    if compilation.kind == "folder":
        language = read_folder(model, request.max_length, request.batch)
        source = _Source(language.path, language.language, language.rewrite, language.files)
    source = replace(source, files=(*source.files, *model_files(load_mapped(source.path), source.path)))
    if request.quantize is None:
        yield source
        return
    with quantised(source.path, request.quantize, beside=beside) as made:
        meta = {"quantize": request.quantize, "quantised": [asdict(each) for each in made.weights]}
        yield replace(source, path=made.path, meta=meta)


def _dump_stages(source: _Source, compilation: Compilation, dump: StageFolder) -> None:
    """Write the results of all stages, which are run for this alone: it works even when the bundle is in the cache.

    Raises:
        UserError: as `compile`; the results so far are written.
    """
    single = len(compilation.variants) == 1

    def place(index: int) -> StageFolder:
        return dump if single else dump.of_variant(index + 1)

    def write(index: int, options: Options) -> None:
        place(index).read(IMPORT(source.path, options, source.rewrite, source.extend))

    for index, options in enumerate(compilation.variants):
        write(index, options)
    read, made = _planned(_read(source, compilation, _no_progress), len(compilation.variants), _no_progress)
    for index in range(len(compilation.variants), len(read.options)):
        write(index, read.options[index])
    for index, each in made.items():
        place(index).compiled(each, read.graphs[index].graph)
    dump.write(PACK, PACK.text(PACK([each.generated for each in made.values()])))


def _no_progress(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


def _planned(
    read: Variants, needed: int, progress: Progress, begin: Callable[[Generated, OverlapPlan | None], None] = lambda *_: None
) -> tuple[Variants, dict[int, CompiledVariant]]:
    """The variants and their programs with plans; without those after the first `needed`, if the budget is too small for them.

    `begin`: see `plan_variants`.
    """
    try:
        return read, plan_variants(read, progress, begin)
    except BudgetError:
        least = read.first(needed)
        if least is read:
            raise
        return least, plan_variants(least, progress, begin)


@collecting_seldom()
def compile_rehearsal(compilation: Compilation, output: Path, progress: Progress) -> tuple[Bundle, int]:
    """A bundle with weights of zeros, which takes little time and disk space, and the smallest budget of its model in bytes.

    Raises:
        UserError: as `compile`.
    """
    if compilation.request.quantize is not None:
        raise UserError("--estimate reads no weights, and --quantize needs them; leave out one of them")
    with _as_onnx(compilation, sketch=True) as source:
        read = _read(source, compilation, progress)
        made = _compile(compilation, source, read, output, progress, None, with_weights=False)
        least = read.first(len(compilation.variants))
        return made, max(least.refusal(index).smallest_bytes for index in range(len(least.options)))


def _read(source: _Source, compilation: Compilation, progress: Progress) -> Variants:
    """Read the graph of each variant; of a language model perhaps one more. Raises UserError."""

    def read(options: Options) -> Graph:
        return read_graph(source.path, options, source.rewrite, source.extend)

    progress("import", 0.0)
    variants = compilation.variants
    made = Variants.of(variants, read_graphs(variants, read))
    if not compilation.is_language or compilation.request.batch != 1:
        return made
    longest = Language.from_json(source.language).max_length
    return with_longer_run(made, longest, lambda options: GroupedGraph.of(read(options), options))


def _compile(
    compilation: Compilation,
    source: _Source,
    read: Variants,
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
    model = compilation.model
    options = compilation.variants[0]
    data = states_of(file for file in source.files if file.resolve() != model.resolve())

    def begin(generated: Generated, plan: OverlapPlan | None = None) -> None:
        if kernels is not None:
            request = BuildRequest(
                generated.program, generated.source, options.descriptor, options.request.strategy, options.mode, plan
            )
            kernels.begin(request)

    read, made = _planned(read, len(compilation.variants), progress, begin)
    joined = dict(zip(made, PACK([each.generated for each in made.values()]), strict=True))
    nbytes = joined[0].program.weights_bytes

    def packed(name: str, _: int) -> None:
        progress("pack weights", bundle.size / nbytes)
        if kernels is not None:
            kernels.poll()

    with BundleWriter(output) as bundle, _searching(made, options, with_weights=with_weights) as search:
        if with_weights:
            write_weights(list(joined.values()), bundle, packed)
        else:
            bundle.leave_empty(joined[0].program.constants_offset)
            write_constants([*joined.values()][-1], bundle)
        if search is not None and (plan := search.result(_patience(options))) != made[0].plan:
            made[0] = LAY_OUT(replace(made[0], plan=plan), options)
            begin(made[0].generated, plan)
        bundle.commit_all(
            [_variant(joined[index], made[index], options) for index, options in enumerate(read.options)],
            options.descriptor.portable,
            {**_about(model, options), **_states_in_half(read.graphs[0].graph), **source.meta, DATA_FILES: data},
            source.language,
        )
    return Bundle.open(output)


def _searching(
    made: Mapping[int, CompiledVariant], options: Options, *, with_weights: bool
) -> AbstractContextManager[SearchProcess | None]:
    """The search for a better plan while weights are packed, if there is a gap; None if there is nothing to search.

    Variants of a model that share weights are planned together, so their plans stay.
    """
    [first, *others] = made.values()
    asked = options.request.solver == "cp-sat"
    packed_at_once = first.generated.program.weights_bytes < LEAST_SEARCHED and not asked
    if others or not with_weights or packed_at_once or not may_search(first.plan, options.request):
        return nullcontext()
    return SearchProcess(first.generated.program, first.plan, options.descriptor, options.request)


LEAST_SEARCHED = 32 << 20
"""Bytes of weights below which they are packed before a search could find anything."""


def _patience(options: Options) -> float | None:
    """How many seconds a search may last once all weights are packed; None for as long as it needs, where that was asked."""
    asked = options.request.solver == "cp-sat" or options.request.solve_seconds is not None
    return None if asked else PATIENCE


PATIENCE = 2.0
"""The most seconds by which a search makes a compilation longer."""


def _variant(generated: Generated, planned: CompiledVariant, options: Options) -> ShapeVariant:
    """One shape variant of the bundle. `generated`: its program, with the weights that variants share."""
    program = generated.program
    plan = planned.plan
    codes = {name: ProgramCode(program.with_launches_of(each.program), each.source) for name, each in planned.elsewhere.items()}
    own = {
        "shapes": {name: list(shape) for name, shape in options.shapes.items()},
        CARRIED: carried(_posed(program, plan, options)),
    }
    return ShapeVariant(program, plan, generated.source, own, codes)


def _posed(program: Program, plan: OverlapPlan, options: Options) -> Instance:
    """The overlap-plan problem that `plan` solves, stored so that the bundle can be planned again for other budgets."""
    return planning_instance(program, options.descriptor, options.mode, options.request.replace(chunk=plan.chunk_bytes))


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
        "budget_bytes": options.request.budget,
        "mode": options.mode,
        "limits": options.request.values(Limits),
        "constants": dict(options.request.constants),
    }
