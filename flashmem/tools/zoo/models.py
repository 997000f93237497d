"""The models of the zoo, by name."""

from __future__ import annotations

from flashmem.base.errors import UserError
from flashmem.tools.zoo.recipes import classifiers, depth, diffusion, language, segmentation, speech
from flashmem.tools.zoo.recipes.recipe import ZooModel

_FAMILIES = (classifiers, language, speech, segmentation, depth, diffusion)

MODELS: dict[str, ZooModel] = {model.name: model for family in _FAMILIES for model in family.MODELS}


def names() -> tuple[str, ...]:
    """The full-size models, in the order they are listed to a person."""
    return tuple(model.name for model in MODELS.values() if not model.tiny)


def tiny_names() -> tuple[str, ...]:
    """The narrow versions that the tests' data is exported from."""
    return tuple(model.name for model in MODELS.values() if model.tiny)


def find(name: str) -> ZooModel:
    """The model called `name`; a UserError lists what there is."""
    try:
        return MODELS[name]
    except KeyError:
        raise UserError(f"no model {name!r} in the zoo: choose one of {', '.join(names() + tiny_names())}") from None
