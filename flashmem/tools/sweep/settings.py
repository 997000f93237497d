"""Axes of a sweep for options of a plan that have no axis of their own: `--vary strategy=stream,same-op`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from flashmem.base.errors import UserError
from flashmem.request.description import Option
from flashmem.request.kinds import Flag, Numeric, OneOf
from flashmem.request.limits import Limits

_OTHERWISE = {"lambda_": "--lambda", "mu": "--mu", "objective": "--objective"}
"""Options of one value that the sweep has itself."""

FIXED_BY_BUNDLES = ("unfusion", "alpha")
"""They split fusion groups, which are those of a bundle once it is compiled."""

_FLAG = {"yes": True, "no": False}


def varied() -> dict[str, Option]:
    """The options that can be varied, by the name that a command line gives them."""
    kept = {name: each for name, each in Limits.options.items() if name not in _OTHERWISE}
    return {_name(each): each for each in kept.values() if isinstance(each.kind, Flag | Numeric | OneOf)}


def combinations(texts: Sequence[str]) -> list[str]:
    """Every combination of the values that `texts` give, each as words NAME=VALUE, sorted, separated by spaces.

    Raises:
        UserError: an unknown option, one that is given twice, or a value that it refuses.
    """
    axes: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not all(values.split(",")):
            raise UserError(f"--vary {text!r} has no values; write NAME=VALUE,VALUE, for instance strategy=stream,same-op")
        if name in axes:
            raise UserError(f"--vary {name} is given twice; write all its values in one, separated by commas")
        axes[name] = values.split(",")
        for value in axes[name]:
            _read(name, value)
    order = sorted(axes)
    return [
        " ".join(f"{name}={value}" for name, value in zip(order, each, strict=True))
        for each in product(*(axes[name] for name in order))
    ]


def keywords(settings: str) -> dict[str, Any]:
    """One combination as keywords of a request."""
    words = [word.partition("=") for word in settings.split()]
    return {varied()[name].name: _read(name, value) for name, _, value in words}


def _name(option: Option) -> str:
    return option.flags[0].removeprefix("--")


def _read(name: str, word: str) -> Any:
    known = varied()
    if name not in known:
        own = {flag.removeprefix("--"): flag for flag in ("--m-peak", "--budget", "--precision", *_OTHERWISE.values())}
        hint = f"it is an axis of its own: {own[name]}" if name in own else f"name one of: {', '.join(sorted(known))}"
        raise UserError(f"--vary {name} is not known; {hint}")
    option = known[name]
    if not isinstance(option.kind, Flag):
        return option.read(word)
    if word not in _FLAG:
        raise UserError(f"--vary {name}={word} is neither yes nor no; write {name}=yes,no for both")
    return _FLAG[word]
