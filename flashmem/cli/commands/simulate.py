"""`flashmem simulate`: predict a session's latency and memory from the plan and the device's descriptor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from flashmem.base.types import TransferMode
from flashmem.base.units import format_size
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import is_bundle
from flashmem.bundle.shape_variants import port_shapes
from flashmem.cli.calls.models import SimulateCommand
from flashmem.cli.commands.compiling import open_bundle
from flashmem.cli.commands.plan_summary import summary
from flashmem.cli.commands.plan_zoo import ZooPlan, plan_architecture
from flashmem.cli.commands.timeline import write_prediction
from flashmem.cli.output.console import emit_json, print_facts
from flashmem.program.program import Program, host_bytes
from flashmem.runtime.opencl.processor import rates_said
from flashmem.runtime.request.options import (
    choose_budget,
    choose_host_budget,
    choose_mode,
    choose_strategy,
    find_descriptor,
)
from flashmem.schedule.host_tier import reloaded, tier_bytes
from flashmem.schedule.plan import OverlapPlan
from flashmem.schedule.residency import Strategy, preload_all, session_bytes
from flashmem.target.descriptor import DeviceDescriptor
from flashmem.tools.plots.figure import model_name
from flashmem.tools.simulation.scenario import describe, layout_for
from flashmem.tools.simulation.simulator import Prediction, simulate
from flashmem.tools.timeline.page import check_page
from flashmem.tools.zoo.names import architecture


@dataclass(frozen=True)
class _Subject:
    """A program and its plan, with or without weights. `mode` is the transfer mode of the plan, if known."""

    title: str
    program: Program
    plan: OverlapPlan
    descriptor: DeviceDescriptor
    mode: object
    budget_bytes: int | None

    @classmethod
    def of_bundle(cls, bundle: Bundle, device: str | None = None) -> Self:
        """The subject for a bundle, on its own device or on `device`."""
        title = model_name(Path(str(bundle.meta.get("model_path") or bundle.path)))
        descriptor = find_descriptor(device or "auto", own=bundle.descriptor)
        return cls(title, bundle.program, bundle.plan, descriptor, bundle.meta.get("mode"), bundle.budget_bytes)

    @classmethod
    def of_zoo(cls, zoo: ZooPlan) -> Self:
        """The subject for a known architecture."""
        return cls(zoo.name, zoo.program, zoo.plan, zoo.descriptor, zoo.mode, zoo.budget_bytes)


@dataclass(frozen=True)
class _Simulated:
    subject: _Subject
    mode: TransferMode
    strategy: Strategy
    prediction: Prediction


def simulate_model(options: SimulateCommand) -> None:
    """Simulate `model`, a bundle, an ONNX file or `zoo:NAME`, on a descriptor, and print the prediction.

    Raises:
        UserError: a file or an option is invalid.
    """
    if options.timeline is not None:
        check_page(options.timeline, "--timeline")  # before the model is compiled
    subject = _subject(options)
    strategy = choose_strategy(subject.plan, options.strategy)
    # A plan made now already has the budget; an existing bundle is simulated with this one.
    budget = options.budget if is_bundle(options.model) else None
    simulated = _simulate(subject, options.mode, budget, strategy, options)
    if options.timeline is not None:
        write_prediction(options.timeline, _title(simulated, options), simulated.prediction)
    if options.json:
        emit_json(prediction_json(simulated, options))
    else:
        _print(simulated, options)


def _subject(options: SimulateCommand) -> _Subject:
    """The subject of the simulation: a bundle on any device, or a new plan for the requested device and strategy."""
    model = options.model
    if is_bundle(model):
        return _Subject.of_bundle(open_bundle(model, options), options.device)
    if (name := architecture(model)) is not None:
        return _Subject.of_zoo(plan_architecture(name, options.of_bundle))
    return _Subject.of_bundle(open_bundle(model, options))


def _simulate(subject: _Subject, mode: str, budget: int | None, strategy: Strategy, options: SimulateCommand) -> _Simulated:
    program = subject.program
    plan = subject.plan
    descriptor = subject.descriptor
    chosen = choose_mode(descriptor, mode, path=program.memory_path, planned=subject.mode, strategy=strategy)
    layout = layout_for(program, plan, chosen, strategy, shares_memory=descriptor.shares_memory)
    again = sum(map(tier_bytes, reloaded([(preload_all(plan) if strategy == "preload" else plan, program.slices)])))
    on_host = layout.ring_bytes + host_bytes(program)
    host = choose_host_budget(
        options.host_budget, on_host, again, mode=chosen, shares_memory=descriptor.shares_memory, here=False
    )
    needed = session_bytes(program, layout, shares_memory=descriptor.shares_memory)
    limit = choose_budget(budget, subject.budget_bytes, needed, mode=chosen, strategy=strategy)
    if strategy != "preload":
        plan = replace(plan, layouts={chosen: layout})
    scenario = describe(program, plan, descriptor, chosen, disk=options.disk, strategy=strategy, host_budget=host)
    return _Simulated(subject, chosen, strategy, simulate(scenario, limit))


def prediction_json(simulated: _Simulated, options: SimulateCommand) -> dict[str, Any]:
    """The JSON object of the prediction, with the keys of `flashmem run` that a prediction has."""
    prediction = simulated.prediction
    program = simulated.subject.program
    latency = prediction.report.latency
    memory = prediction.report.memory
    seconds = {"integrated": latency.integrated, "init": latency.init, "exec": latency.exec, "warm": prediction.later}
    return {
        "simulated": True,
        "device": simulated.subject.descriptor.name,
        "device_measured": simulated.subject.descriptor.measured,
        "device_measured_on": simulated.subject.descriptor.measured_on,
        "memory_path": program.memory_path,
        "transfer_mode": simulated.mode,
        "strategy": simulated.strategy,
        "precision": program.precision,
        "shapes": port_shapes(program.inputs),
        "disk": options.disk,
        "latency_ms": {name: 1e3 * value for name, value in seconds.items()},
        "busy_ms": {name: 1e3 * value for name, value in prediction.busy.items()},
        "memory": {
            "peak_bytes": memory.peak_bytes,
            "average_bytes": memory.average_bytes,
            "budget_bytes": memory.budget_bytes,
            "by_category": dict(memory.by_category),
            **({} if memory.host is None else {"host": asdict(memory.host)}),
        },
        "plan": summary(simulated.subject.plan, simulated.subject.program),
    }


def _title(simulated: _Simulated, options: SimulateCommand) -> str:
    subject = simulated.subject
    return f"{subject.title} on {subject.descriptor.name}, {simulated.strategy}, mode {simulated.mode}, file {options.disk}"


def _print(simulated: _Simulated, options: SimulateCommand) -> None:
    prediction = simulated.prediction
    descriptor = simulated.subject.descriptor
    latency = prediction.report.latency
    memory = prediction.report.memory
    budget = "no budget" if memory.budget_bytes is None else f"budget {format_size(memory.budget_bytes)}"
    if (host := memory.host) is not None:
        of = "" if host.budget_bytes is None else f" of {format_size(host.budget_bytes)}"
        budget += f"; on the host {format_size(host.peak_bytes)}{of}"
    answer = f"{1e3 * latency.integrated:.1f} ms ({1e3 * latency.init:.1f} to prepare, {1e3 * latency.exec:.1f} to run)"
    busy = {"disk": "disk", "read": "reading the page cache", "copy": "copying", "compute": "compute"}
    print_facts(
        {
            "device": f"{descriptor.name} ({rates_said(descriptor)}), {simulated.subject.program.memory_path} path, "
            f"mode {simulated.mode}, {simulated.strategy}, file {options.disk}",
            "first answer": f"{answer}, later ones {1e3 * prediction.later:.1f} ms: predicted",
            "plan": simulated.subject.plan.proof,
            "memory": f"{format_size(memory.peak_bytes)} at most, {format_size(memory.average_bytes)} on average, {budget}",
            "busy": ", ".join(
                f"{label} {1e3 * seconds:.1f} ms" for key, label in busy.items() if (seconds := prediction.busy.get(key))
            ),
        }
    )
