"""The models of the zoo, by name."""

from __future__ import annotations

from flashmem.base.errors import UserError
from flashmem.tools.zoo.recipes import classifiers, depth, diffusion, language, segmentation, speech
from flashmem.tools.zoo.recipes.recipe import ZooModel

_FAMILIES = (classifiers, language, speech, segmentation, depth, diffusion)

MODELS: dict[str, ZooModel] = {model.name: model for family in _FAMILIES for model in family.MODELS}


def names() -> tuple[str, ...]:
    """The full-size models, in the order of the list for users."""
    return tuple(model.name for model in MODELS.values() if not model.tiny)


def tiny_names() -> tuple[str, ...]:
    """The small versions from which the tests' data is exported."""
    return tuple(model.name for model in MODELS.values() if model.tiny)


def find(name: str) -> ZooModel:
    """The model called `name`. Raises UserError with the list of models."""
    try:
        return MODELS[name]
    except KeyError:
        raise UserError(f"no model {name!r} in the zoo: choose one of {', '.join(names() + tiny_names())}") from None
