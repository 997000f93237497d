"""Profiles of candidates that run alone (CARIn, section 4.2): measured by a session on the device, or simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from flashmem.base.errors import BudgetError, UserError
from flashmem.bundle.bundle import Bundle
from flashmem.compile import compile as compile_model
from flashmem.program.program import raw_bytes
from flashmem.runtime.engine.inputs import complete_inputs
from flashmem.runtime.opencl.discovery import list_devices
from flashmem.runtime.request.options import choose_mode, device_here
from flashmem.runtime.session import Session
from flashmem.tools.design.application import Application, Processor, Task, Variant
from flashmem.tools.design.metrics import Candidate, Profile
from flashmem.tools.simulation.scenario import describe, layout_for
from flashmem.tools.simulation.simulator import simulate


@dataclass(frozen=True)
class Profiling:
    """`runs` answers are measured after the first one; `simulated` simulates them instead. `seed` is the seed of the inputs."""

    runs: int = 20
    simulated: bool = False
    seed: int = 0


def processors_here() -> tuple[Processor, ...]:
    """The devices of this machine by the names of their descriptors. All runtimes of the CPU are one processor.

    Raises:
        UserError: no device.
    """
    found = {
        device.descriptor_name: Processor(device.descriptor_name, "cpu" if device.kind == "cpu" else device.descriptor_name)
        for device in list_devices()
    }
    if not found:
        raise UserError("no OpenCL device is here; name descriptors as [[device]] and add --simulate")
    return tuple(found.values())


def candidates(
    application: Application, profiling: Profiling, say: Callable[[str], None] = lambda text: None
) -> Iterator[Candidate]:
    """Profile every model of every task on every device within every budget.

    Skips a candidate that needs more memory than its budget; `say` receives the message.

    Raises:
        UserError: a model or a device cannot be used.
        RunError: a run failed.
    """
    for task in application.tasks:
        for variant in task.variants:
            for processor in application.processors or processors_here():
                for budget in application.budgets:
                    try:
                        profile = _profile(task, variant, processor, budget, profiling)
                    except BudgetError as refused:
                        say(f"left out: {variant.title} on {processor.device}: {refused}")
                        continue
                    say(f"{task.name}: {variant.title} on {processor.device}: {profile.later[0] * 1e3:.1f} ms")
                    yield Candidate(task.name, variant, processor, budget, profile)


def compile_candidate(variant: Variant, processor: Processor, budget: int | None, *, here: bool) -> Bundle:
    """The candidate's bundle in the user's cache. Its kernels are built if the device is on this machine (`here`)."""
    device = processor.device
    shapes = dict(variant.shapes)
    return compile_model(variant.path, device=device, precision=variant.precision, shapes=shapes, budget=budget, build=here)


def _profile(task: Task, variant: Variant, processor: Processor, budget: int | None, profiling: Profiling) -> Profile:
    bundle = compile_candidate(variant, processor, budget, here=not profiling.simulated)
    if profiling.simulated:
        first, later, memory = _simulate(bundle)
    else:
        first, later, memory = _measure(bundle, device_here(processor.device).descriptor_name, profiling)
    macs = sum(launch.macs for launch in bundle.program.launches)
    return Profile(first, later, memory, raw_bytes(bundle.program), macs)


def _measure(bundle: Bundle, device: str, profiling: Profiling) -> tuple[float, tuple[float, ...], int]:
    inputs = complete_inputs(bundle.program, {}, profiling.seed)
    with Session(bundle, device=device) as session:
        reports = []
        for _ in range(profiling.runs + 1):
            session.run(None, inputs)
            reports.append(session.last_run)
    found = [report for report in reports if report is not None]
    memory = max(report.memory.peak_bytes for report in found)
    return found[0].latency.integrated, tuple(report.latency.exec for report in found[1:]), memory


def _simulate(bundle: Bundle) -> tuple[float, tuple[float, ...], int]:
    program = bundle.program
    plan = bundle.plan
    descriptor = bundle.descriptor
    mode = choose_mode(descriptor, "auto", path=program.memory_path, planned=bundle.meta.get("mode"), strategy="stream")
    plan = replace(plan, layouts={mode: layout_for(program, plan, mode)})
    predicted = simulate(describe(program, plan, descriptor, mode, disk="cached"), bundle.budget_bytes)
    return predicted.report.latency.integrated, (predicted.later,), predicted.report.memory.peak_bytes
