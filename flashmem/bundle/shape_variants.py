"""Shape variants: parsing the shapes that a model is compiled for, and selecting the variant that fits given inputs.

A variant has a shape for each input that the user named; other inputs keep the model's shapes.
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
    """Parse the variants in `--shape ids=1x32 --shape ids=1x128`, in order; at least one, which may be empty.

    A repeated name begins the next variant. Inputs that a later variant does not name have the shapes of the first one.

    Raises:
        UserError: a text is not a shape, or two variants are the same.
    """
    variants: list[dict[str, Shape]] = [{}]
    for name, shape in map(parse_shape, texts):
        if name in variants[-1]:
            variants.append({})
        variants[-1][name] = shape
    return checked_variants([{**variants[0], **each} for each in variants])


def checked_variants(shapes: Shapes | Sequence[Shapes] | None) -> tuple[dict[str, Shape], ...]:
    """The variants of the argument `shapes` of `flashmem.compile`, one mapping or several.

    Raises:
        UserError: the sequence is empty, or two variants are the same.
    """
    variants = tuple(map(_plain, [shapes] if shapes is None or isinstance(shapes, Mapping) else shapes))
    if not variants:
        raise UserError("shapes is an empty list; give the shapes of one variant at least, or leave it out")
    twice = next((each for i, each in enumerate(variants) if each in variants[:i]), None)
    if twice is not None:
        raise UserError(f"the shapes {shapes_text(twice)} are given twice; name each variant once")
    return variants


def _plain(shapes: Shapes | None) -> dict[str, Shape]:
    return {name: tuple(shape) for name, shape in (shapes or {}).items()}


def shapes_text(shapes: Shapes) -> str:
    """Shapes in the form of `--shape`: `ids=1x32 mask=1x32`."""
    return " ".join(f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items()) or "as the model has them"


def port_shapes(ports: Sequence[Port]) -> dict[str, Shape]:
    """The shapes of ports by name."""
    return {port.name: port.shape for port in ports}


def list_text(variants: Sequence[Sequence[Port]]) -> str:
    """Shapes of variants for an error message: `ids=1x32; ids=1x128`. Omits inputs with the same shape in all variants."""
    all_shapes = [port_shapes(ports) for ports in variants]
    same = {name for name, shape in all_shapes[0].items() if all(each.get(name) == shape for each in all_shapes)}
    if len(all_shapes) == 1 or len(same) == len(all_shapes[0]):
        same = set()
    return "; ".join(shapes_text({name: shape for name, shape in each.items() if name not in same}) for each in all_shapes)


def stored_again(programs: Sequence[Program]) -> dict[str, int]:
    """Weights that a file of shape variants stores in several forms, with the bytes beyond the largest need of one variant.

    Different kernels need different forms, and so do different shapes.
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


def find_variant(variants: Sequence[Sequence[Port]], given: Mapping[str, Any]) -> int | None:
    """The index of the first variant whose input shapes match all arrays in `given`; None if no variant fits.

    Each variant is given by its input ports. `given` may lack inputs. Names, types and values without a shape are not checked.
    """
    for index, ports in enumerate(variants):
        if all(getattr(given.get(port.name), "shape", port.shape) == port.shape for port in ports):
            return index
    return None


def which_fits(variants: Sequence[Sequence[Port]], given: Mapping[str, Any]) -> int:
    """The index of the variant that fits `given`; see `fitting`. A single variant is not checked.

    Raises:
        ValueError: no variant fits; the message lists them.
    """
    index = 0 if len(variants) == 1 else find_variant(variants, given)
    if index is None:
        shapes = {port.name: given[port.name].shape for port in variants[0] if hasattr(given.get(port.name), "shape")}
        raise ValueError(f"the inputs are {shapes_text(shapes)}; the bundle was compiled for: {list_text(variants)}")
    return index


def asked_for(variants: Sequence[Sequence[Port]], shapes: Shapes) -> int | None:
    """The index of the first variant whose inputs have these `shapes`; None if no variant has them."""
    for index, ports in enumerate(variants):
        own = port_shapes(ports)
        if all(own.get(name) == tuple(shape) for name, shape in shapes.items()):
            return index
    return None
