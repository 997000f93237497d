"""`flashmem run`: run a model, and report latency and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from numpy.typing import NDArray

from flashmem.base.errors import MissingFileError, NoDeviceError, RunError, UserError
from flashmem.base.extras import offline_half
from flashmem.base.files import check_target
from flashmem.base.streams import say
from flashmem.base.types import Precision, StatePrecision, TransferMode
from flashmem.base.units import format_size
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import is_bundle
from flashmem.bundle.shape_variants import list_text, port_shapes, which_fits
from flashmem.cli.calls.models import RunCommand
from flashmem.cli.commands.compiling import open_bundle, within_process
from flashmem.cli.commands.file_inputs import MadeInputs, made_inputs
from flashmem.cli.commands.plan_summary import summary
from flashmem.cli.commands.trace import write_trace
from flashmem.cli.output.console import emit_json, print_facts, show_spinner
from flashmem.runtime.engine.inputs import check_input_file, complete_inputs, read_inputs, stored_arrays, write_outputs
from flashmem.runtime.engine.report import HostMemoryUse, RunReport, process_rss
from flashmem.runtime.opencl.discovery import use_one_device
from flashmem.runtime.request.options import device_here, find_descriptor
from flashmem.runtime.session import Session, Strategy

if TYPE_CHECKING:
    from flashmem.tools.inputs.classes import Classes
    from flashmem.tools.verify import Verification


@dataclass(frozen=True)
class Outcome:
    """The result of the runs of one session: the outputs of the last one, and a report of each.

    `bare_bytes` is the resident memory of the process without a session. It includes the interpreter, numpy, pyopencl, the
    driver and the device's context, but neither the bundle nor the inputs. It is None if the system does not report it.
    """

    bundle: Bundle
    device: str
    transfer_mode: TransferMode
    strategy: str
    outputs: list[NDArray[Any]]
    reports: list[RunReport]
    bare_bytes: int | None
    process_limit: int | None = None


def run_model(options: RunCommand) -> None:
    """Run the model, a bundle or an ONNX file, and print the report.

    Raises:
        UserError: a file or an option is invalid.
        RunError: the run failed, or `--verify` found a difference (after the report is printed).
    """
    for path, flag in ((options.output, "--output"), (options.trace, "--trace")):
        if path is not None:
            check_target(path, flag)
    if options.timeline is not None:
        from flashmem.tools.timeline.page import check_page  # a phone has no Bokeh; it has --trace

        check_page(options.timeline, "--timeline")
    if options.verify:
        from flashmem.tools.verify import check_installed  # a phone has neither ONNX Runtime nor the model

        check_installed()
    if options.learn and options.strategy == "preload":
        raise UserError("--learn needs runs that stream; leave --strategy preload out")
    if options.learn and options.host_budget is not None:
        raise UserError("--learn measures reads, which --host-budget saves; leave --host-budget out")
    if options.input is not None:
        check_input_file(options.input)
    if options.reference is not None and not options.reference.is_file():
        raise MissingFileError(f"--model {options.reference}: no such file")
    with made_inputs(options) as (made, shaped):
        _run_with(shaped, made)


def _run_with(options: RunCommand, made: MadeInputs | None) -> None:
    """Open the bundle, run it on inputs from files, and report."""
    model = options.model
    files = [path for path in (options.input, None if made is None else made.arrays) if path is not None]
    use_one_device()
    options, process = within_process(options, compiles=not is_bundle(model))
    if not is_bundle(model):
        with suppress(NoDeviceError):  # its driver is no part of the bundle
            device_here(options.device)
    before = process_rss() or 0
    bundle = open_bundle(model, options, build=options.build, process=process)
    if files and not (is_bundle(model) and any(options.shapes)):
        bundle = _select_variant(bundle, files)
    if made is not None:
        made.check(bundle.program.outputs)

    def make_inputs() -> dict[str, NDArray[Any]]:
        given = {name: array for path in files for name, array in read_inputs(path, bundle.program.inputs).items()}
        return complete_inputs(bundle.program, given, options.seed)

    inputs = HandedOver(make_inputs)
    opened = (process_rss() or 0) - before
    outcome = _run(bundle, inputs, options, opened=opened)
    names = [port.name for port in bundle.program.outputs]
    if options.output is not None:
        write_outputs(options.output, names, outcome.outputs)
    if options.trace is not None:
        write_trace(options.trace, outcome.reports[0])
    if options.timeline is not None:
        _draw_timeline(options.timeline, outcome, options.device)
    if options.learn:
        _learn(outcome)
    verification = None
    if options.verify:
        from flashmem.tools.verify import compare, reference

        original = options.reference or Path(str(bundle.meta.get("model_path", "")))
        wanted = reference(
            original, make_inputs(), names, constants=bundle.meta.get("constants", {}), states=bundle.program.states,
            runs=options.repeat, quantize=bundle.meta.get("quantize"),
        )  # fmt: skip
        verification = compare(outcome.outputs, wanted, _lowest_precision(bundle))
    classes = None if made is None else made.classes(dict(zip(names, outcome.outputs, strict=True)))
    if options.json:
        report = report_json(outcome, options, verification)
        if made is not None:
            report |= {"inputs": made.sentences, "classes": classes and classes.to_json()}
        emit_json(report)
    else:
        _print(outcome, options, verification)
        if made is not None:
            _print_made(bundle, made, options, classes)
    if verification is not None and not verification.ok:
        from flashmem.tools.verify import complaint

        raise RunError(complaint(verification, _lowest_precision(bundle)))


def _lowest_precision(bundle: Bundle) -> Precision | StatePrecision:
    """The lowest precision in which anything of `bundle` is stored, apart from integers of the model."""
    return "int8" if bundle.meta.get("state_precision") == "int8" else bundle.program.lowest_precision


def _select_variant(bundle: Bundle, files: Sequence[Path]) -> Bundle:
    """The bundle with the shape variant for the arrays in the files selected. Raises UserError if no variant fits."""
    if len(bundle.variants) == 1:
        return bundle
    stored = {name: array for path in files for name, array in stored_arrays(path).items()}
    try:
        return bundle.variant(which_fits([variant.program.inputs for variant in bundle.variants], stored))
    except ValueError as error:
        raise UserError(f"{files[0]}: {error}") from error


class HandedOver(Mapping[str, NDArray[Any]]):
    """Inputs that a run can take over, to free them while launches run. They are created again for the next run."""

    def __init__(self, make: Callable[[], dict[str, NDArray[Any]]]) -> None:
        self._make = make
        self._arrays = make()
        self._names = tuple(self._arrays)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._arrays and name in self._names:
            self._arrays |= self._make()
        return self._arrays.pop(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _run(bundle: Bundle, inputs: HandedOver, options: RunCommand, *, opened: int) -> Outcome:
    asked = {**options.of_session, "trace": options.traced, "prepare": options.repeat > 1}
    if not is_bundle(options.model):
        asked.pop("budget", None)  # a model compiled now has it in the bundle
    reports = []
    with (
        show_spinner("preparing kernels and running", quiet=options.json),
        Session(bundle, **asked) as session,
    ):
        for _ in range(options.repeat):
            outputs: list[NDArray[Any]] = []  # drops the previous outputs before the next run
            try:
                outputs = session.run(None, inputs)
            except ValueError as error:  # an input of the wrong shape, type or range
                raise UserError(str(error)) from error
            assert session.last_run is not None
            reports.append(session.last_run)
        device = f"{session.device.platform}: {session.device.name}"
        start = reports[0].memory.process_start_rss_bytes
        bare = None if start is None else start - opened
        limit = session.process_memory
        return Outcome(bundle, device, session.mode, session.strategy, outputs, reports, bare, limit)


def _draw_timeline(path: Path, outcome: Outcome, device: str) -> None:
    """Write the page of the runs, each beside its prediction for `device` with the file in the page cache."""
    from flashmem.cli.commands.timeline import write_runs
    from flashmem.tools.plots.figure import model_name
    from flashmem.tools.simulation.scenario import describe
    from flashmem.tools.simulation.simulator import simulate

    bundle = outcome.bundle
    mode = outcome.transfer_mode
    strategy = cast(Strategy, outcome.strategy)
    descriptor = find_descriptor(device, own=bundle.descriptor)
    memory = outcome.reports[0].memory
    host = None if memory.host is None else memory.host.budget_bytes
    scenario = describe(bundle.program, bundle.plan, descriptor, mode, strategy=strategy, host_budget=host)
    predicted = simulate(scenario, memory.budget_bytes)
    name = model_name(Path(str(bundle.meta.get("model_path") or bundle.path)))
    write_runs(path, f"{name} on {outcome.device}, {strategy}, mode {mode}", outcome.reports, predicted)


def _learn(outcome: Outcome) -> None:
    """Plan again with the measurements of the runs. It loads the offline half, so it runs after the session and its report.

    Raises:
        UserError: the offline half is not installed, or the bundle cannot be planned again.
    """
    with offline_half("--learn"):
        from flashmem.tools.learn import learn
    before = outcome.bundle.plan
    after = learn(outcome.bundle, outcome.transfer_mode, outcome.reports).plan
    moved = sum(a.read_layer != b.read_layer for a, b in zip(before.weights, after.weights, strict=True))
    say(f"planned again from what was measured: {moved} of {len(after.weights)} slices are loaded at another layer")


def report_json(outcome: Outcome, options: RunCommand, verification: Verification | None) -> dict[str, Any]:
    """The JSON object of the report. `latency_ms` is for the first run, `warm` the median over the others."""
    first, *later = outcome.reports
    memory = first.memory
    latency = {"integrated": first.latency.integrated, "init": first.latency.init, "exec": first.latency.exec}
    if later:
        latency["warm"] = _warm(later)
    report: dict[str, Any] = {
        "device": outcome.device,
        "memory_path": outcome.bundle.program.memory_path,
        "transfer_mode": outcome.transfer_mode,
        "strategy": outcome.strategy,
        "precision": outcome.bundle.program.precision,
        "shapes": port_shapes(outcome.bundle.program.inputs),
        "latency_ms": {name: 1e3 * seconds for name, seconds in latency.items()},
        "memory": {
            "peak_bytes": max(report.memory.peak_bytes for report in outcome.reports),
            "average_bytes": memory.average_bytes,
            "budget_bytes": memory.budget_bytes,
            "process_peak_rss_bytes": outcome.reports[-1].memory.process_peak_rss_bytes,
            "process_bare_rss_bytes": outcome.bare_bytes,
            "process_limit_bytes": outcome.process_limit,
            "by_category": dict(memory.by_category),
        },
        "plan": summary(outcome.bundle.plan, outcome.bundle.program),
        "direct_bytes": sum(each.direct_bytes for each in outcome.reports),
        "no_direct_reads": first.no_direct_reads,
    }
    if memory.host is not None:
        copied = later[-1].host_tier_bytes if later else 0
        report["memory"]["host"] = {**asdict(memory.host), "copied_by_later_runs_bytes": copied}
    if verification is not None:
        report["verify"] = verification.to_json()
    return report


def _warm(later: Sequence[RunReport]) -> float:
    return median(report.latency.exec for report in later)


def _print(outcome: Outcome, options: RunCommand, verification: Verification | None) -> None:
    first, *later = outcome.reports
    plan = outcome.bundle.plan
    memory = first.memory
    latency = first.latency
    peak = max(report.memory.peak_bytes for report in outcome.reports)
    budget = "no budget" if memory.budget_bytes is None else f"budget {format_size(memory.budget_bytes)}"
    process = ""
    if (most := later[-1].memory if later else memory).process_peak_rss_bytes is not None and outcome.bare_bytes is not None:
        held = format_size(most.process_peak_rss_bytes)
        allowed = "" if outcome.process_limit is None else f" of at most {format_size(outcome.process_limit)}"
        process = f"; process {held}{allowed}, of which {format_size(outcome.bare_bytes)} without a session"
    answer = f"{1e3 * latency.integrated:.1f} ms ({1e3 * latency.init:.1f} to prepare, {1e3 * latency.exec:.1f} to run)"
    how = f"{outcome.bundle.program.memory_path} path, mode {outcome.transfer_mode}, {outcome.strategy}"
    facts = {
        "device": f"{outcome.device}, {how}",
        "first answer": answer + (f", later ones {1e3 * _warm(later):.1f} ms" if later else ""),
        "memory": f"{format_size(peak)} at most, {format_size(memory.average_bytes)} on average, {budget}{process}",
        "plan": f"{plan.proof}, by {plan.tier}, {plan.preload_ratio:.0%} of the weights preloaded",
    }
    if direct := sum(each.direct_bytes for each in outcome.reports):
        facts["weight file"] = f"larger than the memory that is left: {format_size(direct)} read past the page cache"
    if memory.host is not None:
        facts["host memory"] = _host_memory(memory.host, later)
    if len(outcome.bundle.variants) > 1:
        facts["shapes"] = f"{list_text([outcome.bundle.program.inputs])}, one of {len(outcome.bundle.variants)} variants"
    for port, array in zip(outcome.bundle.program.outputs, outcome.outputs, strict=True):
        facts[f"output {port.name}"] = f"{array.dtype} {'x'.join(map(str, array.shape))}{_range(array)}"
    if verification is not None:
        verdict = "equal to ONNX Runtime's" if verification.ok else "NOT equal to ONNX Runtime's"
        facts["verify"] = f"{verdict}, error {verification.relative_error:.2g} of the range"
    print_facts(facts)
    held_most = most.process_peak_rss_bytes
    if outcome.process_limit is not None and held_most is not None and held_most > outcome.process_limit:
        say(f"the process held {format_size(held_most)}, more than --process-memory {format_size(outcome.process_limit)}")


def _print_made(bundle: Bundle, made: MadeInputs, options: RunCommand, classes: Classes | None) -> None:
    """Say how files became inputs, which inputs are random, and the likeliest classes."""
    given = set() if options.input is None else set(stored_arrays(options.input))
    random = [port.name for port in bundle.program.inputs if port.name in made.others and port.name not in given]
    facts = dict(made.sentences)
    if random:
        facts["random"] = f"{', '.join(random)}: drawn from --seed; give {'it' if len(random) == 1 else 'them'} with --input"
    if classes is not None:
        facts["classes"] = f"of {classes.output}, {classes.how}"
        facts |= {f"class {rank}": f"{chance:.1%} {label}" for rank, (chance, _, label) in enumerate(classes.rows, 1)}
    if facts:
        print_facts(facts)


def _host_memory(host: HostMemoryUse, later: Sequence[RunReport]) -> str:
    """Host memory of the runs, and how much of the weights that a later run loads was there."""
    text = format_size(host.peak_bytes)
    if host.budget_bytes is None:
        return text
    text += f" of {format_size(host.budget_bytes)}"
    if not later:
        return text
    loaded = later[-1].loaded_bytes
    copied = later[-1].host_tier_bytes
    return f"{text}; a later run loads {format_size(loaded)} of weights, {format_size(copied)} of them from there"


def _range(array: NDArray[Any]) -> str:
    return f", {array.min():.4g} to {array.max():.4g}" if array.size else ""
