"""The models that can be exported, by name."""

from __future__ import annotations

from benchmarks.exports import classifiers, depth, diffusion, language, segmentation, speech
from benchmarks.exports.recipe import Recipe
from flashmem.base.errors import UserError

_FAMILIES = (classifiers, language, speech, segmentation, depth, diffusion)

MODELS: dict[str, Recipe] = {model.name: model for family in _FAMILIES for model in family.MODELS}


def names() -> tuple[str, ...]:
    """The full-size models, in the order of the list for users."""
    return tuple(model.name for model in MODELS.values() if not model.tiny)


def tiny_names() -> tuple[str, ...]:
    """The small versions from which the tests' data is exported."""
    return tuple(model.name for model in MODELS.values() if model.tiny)


def find(name: str) -> Recipe:
    """The model called `name`. Raises UserError with the list of models."""
    try:
        return MODELS[name]
    except KeyError:
        raise UserError(f"no model {name!r} to export: choose one of {', '.join(names() + tiny_names())}") from None
