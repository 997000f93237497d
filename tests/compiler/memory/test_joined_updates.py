"""Joined updates of caches: which groups become one, by the memory of what they read and write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from flashmem.base.types import StoredType
from flashmem.compiler.ir.fusion_group import FusedGraph, FusionGroup
from flashmem.compiler.ir.graph import Graph, Node, Value
from flashmem.compiler.memory.joined_updates import join_updates
from flashmem.compiler.memory.placement import PlacedGraph

GIVEN = {"covered": False, "steps": 4, "reduction": "none", "update": [1], "items": [2]}
ROWS = (2, 8)


@dataclass
class Memory:
    """Every value is apart, but `inside` others, and every scatter writes over its data."""

    inside: dict[Value, Value] = field(default_factory=dict)
    overwritten: Mapping[Node, Value] = field(default_factory=dict)

    def base(self, value: Value) -> Value:
        return value

    def storage(self, value: Value) -> StoredType:
        return value.dtype

    def holds(self, whole: Value, part: Value, start: int) -> bool:
        return whole is part or self.inside.get(whole) is part


def value(name: str) -> Value:
    return Value(name, ROWS, "float32")


@dataclass
class Layer:
    """Rotary of new keys, an operator between, and scatters of keys and values into their caches; `memory` has all of it."""

    between: str = "Softmax"
    values: Mapping[str, Any] = field(default_factory=lambda: GIVEN | {"update": [3]})

    def __post_init__(self) -> None:
        self.memory = Memory()
        self.indices = Value("indices", (2,), "int64")
        self.turned = value("turned")
        self.rotary = FusionGroup(
            Node("Rotary", "rotary", [value("x"), value("cos"), value("sin")], [self.turned], {"half": 4})
        )
        self.keys = self.scatter("keys", self.turned, GIVEN)
        self.new = self.scatter("values", value("new"), self.values)
        self.other = FusionGroup(Node(self.between, "other", [value("y")], [value("z")], {}))

    def scatter(self, name: str, updates: Value, given: Mapping[str, Any]) -> FusionGroup:
        data, made = value(f"{name}.before"), value(name)
        self.memory.inside[made] = data
        return FusionGroup(Node("ScatterAt", name, [data, self.indices, updates], [made], dict(given)))

    def joined(self, *groups: FusionGroup) -> list[list[str]]:
        fused = FusedGraph(Graph("caches", [], [], []), groups, groups)
        placed = PlacedGraph(fused, "fp32", groups, self.memory, {}, (), ())  # type: ignore[arg-type]
        return [[each.main.name for each in (group, *group.joined)] for group in join_updates(placed).launched]


def test_two_scatters_are_one_group_at_the_place_of_the_second() -> None:
    layer = Layer()
    assert layer.joined(layer.keys, layer.other, layer.new) == [["other"], ["keys", "values"]]


def test_rotary_joins_the_scatters_that_read_its_rows() -> None:
    layer = Layer()
    assert layer.joined(layer.other, layer.rotary, layer.keys, layer.new) == [["other"], ["rotary", "keys", "values"]]
    assert layer.joined(layer.keys, layer.other, layer.rotary, layer.new) == [["other"], ["rotary", "keys", "values"]]


def test_rotary_of_many_tokens_has_a_launch_of_its_own() -> None:
    layer = Layer()
    for group in (layer.keys, layer.new):
        group.main.attributes["steps"] = 65
    assert layer.joined(layer.rotary, layer.keys, layer.new) == [["rotary"], ["keys", "values"]]


def test_rotary_over_its_operand_has_a_launch_of_its_own() -> None:
    layer = Layer()
    layer.memory.overwritten = {layer.rotary.main: layer.rotary.main.input(0)}
    assert layer.joined(layer.rotary, layer.keys, layer.new) == [["rotary"], ["keys", "values"]]


@pytest.mark.parametrize("name", ["items", "reduction", "covered"])
def test_scatters_that_differ_in_more_than_their_updates_stay_apart(name: str) -> None:
    layer = Layer(values=GIVEN | {name: "other"})
    assert layer.joined(layer.keys, layer.new) == [["keys"], ["values"]]


def test_a_scatter_that_copies_its_data_stays_apart() -> None:
    layer = Layer()
    del layer.memory.inside[layer.new.output]
    assert layer.joined(layer.keys, layer.new) == [["keys"], ["values"]]


def test_a_scatter_waits_for_no_other_if_its_result_is_read_before() -> None:
    layer = Layer()
    reader = replace(layer.other, main=replace(layer.other.main, inputs=[layer.keys.output]))
    assert layer.joined(layer.keys, reader, layer.new) == [["keys"], ["other"], ["values"]]


def test_a_scatter_waits_for_no_other_if_its_updates_are_overwritten_before() -> None:
    layer = Layer()
    layer.memory.overwritten = {layer.other.main: layer.turned}
    assert layer.joined(layer.keys, layer.other, layer.new) == [["keys"], ["other"], ["values"]]
