"""Shape variants: a model that is compiled for several shapes of its inputs, and which of them inputs fit.

A variant is a shape for each input that is named; the model says the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashmem.base.errors import UserError
from flashmem.base.units import parse_shape
from flashmem.program.program import Program
from flashmem.program.tensors import Port

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


def read_variants(texts: Sequence[str]) -> tuple[dict[str, Shape], ...]:
    """The variants that `--shape ids=1x32 --shape ids=1x128` asks for, in their order; at least one, which may be empty.

    A name that comes again begins the next variant. What a later variant does not name is as in the first one.

    Raises:
        UserError: a text is no shape, or two variants are the same.
    """
    variants: list[dict[str, Shape]] = [{}]
    for name, shape in map(parse_shape, texts):
        if name in variants[-1]:
            variants.append({})
        variants[-1][name] = shape
    return checked_variants([{**variants[0], **each} for each in variants])


def checked_variants(shapes: Shapes | Sequence[Shapes] | None) -> tuple[dict[str, Shape], ...]:
    """The variants of the argument `shapes` of `flashmem.compile`: one mapping, or several.

    Raises:
        UserError: there are none, or two are the same.
    """
    variants = tuple(map(_plain, [shapes] if shapes is None or isinstance(shapes, Mapping) else shapes))
    if not variants:
        raise UserError("shapes is an empty list; give the shapes of one variant at least, or leave it out")
    twice = next((each for i, each in enumerate(variants) if each in variants[:i]), None)
    if twice is not None:
        raise UserError(f"the shapes {shapes_text(twice)} are asked for twice; name each variant once")
    return variants


def _plain(shapes: Shapes | None) -> dict[str, Shape]:
    return {name: tuple(shape) for name, shape in (shapes or {}).items()}


def shapes_text(shapes: Shapes) -> str:
    """As `--shape` reads them: `ids=1x32 mask=1x32`."""
    return " ".join(f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items()) or "as the model has them"


def port_shapes(ports: Sequence[Port]) -> dict[str, Shape]:
    """The shape of each input."""
    return {port.name: port.shape for port in ports}


def list_text(variants: Sequence[Sequence[Port]]) -> str:
    """The variants whose inputs these are, for a sentence: `ids=1x32; ids=1x128`. Inputs of one shape in all are left out."""
    all_shapes = [port_shapes(ports) for ports in variants]
    same = {name for name, shape in all_shapes[0].items() if all(each.get(name) == shape for each in all_shapes)}
    if len(all_shapes) == 1 or len(same) == len(all_shapes[0]):
        same = set()
    return "; ".join(shapes_text({name: shape for name, shape in each.items() if name not in same}) for each in all_shapes)


def stored_again(programs: Sequence[Program]) -> dict[str, int]:
    """Weights of which the file of shape variants has more than any one of them needs, and how many bytes more: what lies there
    in several forms for different kernels, and what shapes decide.
    """
    by_weight: dict[str, dict[str, int]] = {}
    most: dict[str, int] = {}
    for program in programs:
        own: dict[str, int] = {}
        for part in program.slices:
            by_weight.setdefault(part.weight, {})[part.name] = part.file_bytes
            own[part.weight] = own.get(part.weight, 0) + part.file_bytes
        most |= {name: max(nbytes, most.get(name, 0)) for name, nbytes in own.items()}
    more = {name: sum(parts.values()) - most[name] for name, parts in by_weight.items()}
    return {name: nbytes for name, nbytes in more.items() if nbytes}


def fitting(variants: Sequence[Sequence[Port]], given: Mapping[str, Any]) -> int | None:
    """The first of the variants, by its inputs, whose shapes are those of all arrays `given` that it takes; None if there is
    none. `given` need not have all inputs. Names, types and what is no array are for others to check.
    """
    for index, ports in enumerate(variants):
        if all(getattr(given.get(port.name), "shape", port.shape) == port.shape for port in ports):
            return index
    return None


def which_fits(variants: Sequence[Sequence[Port]], given: Mapping[str, Any]) -> int:
    """`fitting`, where one must fit; of a single variant the rest is for others to check.

    Raises:
        ValueError: none fits; it has the list.
    """
    index = 0 if len(variants) == 1 else fitting(variants, given)
    if index is None:
        shapes = {port.name: given[port.name].shape for port in variants[0] if hasattr(given.get(port.name), "shape")}
        raise ValueError(f"the inputs are {shapes_text(shapes)}; the bundle was compiled for: {list_text(variants)}")
    return index


def asked_for(variants: Sequence[Sequence[Port]], shapes: Shapes) -> int | None:
    """The first of the variants whose inputs have those `shapes`; None if there is none."""
    for index, ports in enumerate(variants):
        own = port_shapes(ports)
        if all(own.get(name) == tuple(shape) for name, shape in shapes.items()):
            return index
    return None
