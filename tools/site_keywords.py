"""An extension of griffe for the site: functions whose keywords follow from a description are shown with these keywords."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import UnionType
from typing import Any, Union, get_args, get_origin

import griffe

from flashmem.request.description import Converted, OptionSet

_DECORATORS = {"flashmem.request.description.keywords_of", "flashmem.request.description.initialised_by"}


class Keywords(griffe.Extension):
    """Gives a function the signature and the docstring that it has when it runs."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Called for each function that griffe read."""
        described = next((each for each in func.decorators if each.callable_path in _DECORATORS), None)
        if described is None:
            return
        module = importlib.import_module(func.module.path)
        owner = getattr(module, func.parent.name) if isinstance(func.parent, griffe.Class) else module
        real = getattr(owner, func.name)
        description = getattr(module, str(described.value).rstrip(")").rpartition("(")[2])
        func.parameters = griffe.Parameters(
            *(_parameter(each, description) for each in inspect.signature(real).parameters.values())
        )
        if (written := func.docstring) is not None:
            written.value = real.__doc__


def _parameter(given: inspect.Parameter, description: type[OptionSet]) -> griffe.Parameter:
    default = None if given.default is given.empty else repr(given.default)
    kind = getattr(griffe.ParameterKind, given.kind.name.lower())
    return griffe.Parameter(given.name, annotation=_annotation(given.name, description), kind=kind, default=default)


def _annotation(name: str, description: type[OptionSet]) -> str | None:
    """The type that a field is given as."""
    owner = next((each for each in description.__mro__ if name in vars(each).get("__annotations__", {})), None)
    if owner is None:
        return None
    text = str(owner.__annotations__[name])
    try:
        known = eval(text, vars(sys.modules[owner.__module__]))
    except NameError:  # a type that is imported for type checkers only
        return text
    return _text(get_args(known)[0] if get_origin(known) is Converted else known)


def _text(known: Any) -> str:
    """A type as it is written in a signature."""
    if get_origin(known) in (Union, UnionType):
        return " | ".join(map(_text, get_args(known)))
    if isinstance(known, type) and not get_args(known):
        return "None" if known is type(None) else known.__name__
    return str(known).replace("typing.", "").replace("collections.abc.", "")
