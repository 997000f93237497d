"""`flashmem plan`: the work, loads and memory of each launch, and the reason for each weight in W."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flashmem.base.extras import offline_half
from flashmem.base.units import format_size
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import is_bundle
from flashmem.bundle.shape_variants import list_text, port_shapes, stored_again
from flashmem.cli.commands.compiling import open_bundle
from flashmem.cli.commands.plan_data import Shown, plan_object
from flashmem.cli.commands.plan_text import print_plan, shorten
from flashmem.cli.commands.plan_zoo import plan_architecture
from flashmem.cli.output.console import emit_json, print_facts
from flashmem.planning.instance import build_instance
from flashmem.planning.planner import thresholds_of
from flashmem.program.program import Program
from flashmem.request.request import BundleRequest
from flashmem.schedule.instance import LayerSpec
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor
from flashmem.tools.zoo.names import architecture

if TYPE_CHECKING:
    from flashmem.tools.smallest_budget import SmallestBudget


def show_plan(model: Path, options: BundleRequest, *, as_json: bool, show_all: bool = False) -> None:
    """Print the plan of a bundle, of a model, or of a known architecture (`zoo:NAME`); it is checked against C0-C3."""
    name = architecture(model)
    if name is not None:
        zoo = plan_architecture(name, options)
        layers = _layers(zoo.program, zoo.plan, zoo.descriptor, options)
        shown = Shown(zoo.name, zoo.descriptor.name, zoo.program, zoo.plan, layers, zoo.seconds)
    else:
        bundle = open_bundle(model, options, chosen_again=False)
        smallest = _smallest(model, options) if model.suffix == ".onnx" else []
        which = [bundle.index] if is_bundle(model) and any(options.shapes) else range(len(bundle.variants))
        if len(bundle.variants) > 1:
            _show_variants([bundle.variant(index) for index in which], options, smallest, as_json, show_all)
            return
        shown = _shown(bundle, options, smallest[0] if smallest else None)
    if as_json:
        emit_json(plan_object(shown, show_all))
    else:
        print_plan(shown, show_all)


def _shown(bundle: Bundle, options: BundleRequest, smallest: SmallestBudget | None) -> Shown:
    layers = _layers(bundle.program, bundle.plan, bundle.descriptor, options)
    return Shown(str(bundle.path), bundle.descriptor.name, bundle.program, bundle.plan, layers, smallest=smallest)


def _layers(program: Program, plan: OverlapPlan, descriptor: DeviceDescriptor, options: BundleRequest) -> tuple[LayerSpec, ...]:
    """The class and the curve of each launch in the problem that `plan` answers."""
    instance = build_instance(
        program, descriptor, chunk_bytes=plan.chunk_bytes, m_peak=plan.m_peak, mode=plan.mode, thresholds=thresholds_of(options)
    )
    return instance.layers


def _show_variants(
    variants: Sequence[Bundle], options: BundleRequest, smallest: Sequence[SmallestBudget], as_json: bool, show_all: bool
) -> None:
    """Print the plans of the shape variants of one bundle, and the size of their weights together."""
    programs = [each.program for each in variants[0].variants]
    again = stored_again(programs)
    shown = [_shown(each, options, smallest[each.index] if smallest else None) for each in variants]
    if as_json:
        plans = [
            {"shapes": port_shapes(each.program.inputs), **plan_object(one, show_all)}
            for each, one in zip(variants, shown, strict=True)
        ]
        emit_json({"model": shown[0].title, "stored_again_bytes": again, "variants": plans})
        return
    more = f", {format_size(sum(again.values()))} of them in more than one form: {shorten(list(again))}" if again else ""
    weights = f"{format_size(programs[0].weights_bytes)} for all{more}"
    print_facts({"variants": list_text([program.inputs for program in programs]), "weight file": weights})
    for each, one in zip(variants, shown, strict=True):
        print()
        print_facts({"shapes": list_text([each.program.inputs])})
        print_plan(one, show_all)


def _smallest(model: Path, options: BundleRequest) -> list[SmallestBudget]:
    """The smallest budget of each shape variant alone."""
    with offline_half("planning"):
        from flashmem.compiler.stages.reading import read_graph
        from flashmem.options import resolve
        from flashmem.tools.smallest_budget import smallest_budget
    found = []
    first = resolve(options)
    for shapes in options.shapes:
        resolved = replace(first, shapes=shapes)
        found.append(smallest_budget(read_graph(model, resolved), resolved))
    return found
