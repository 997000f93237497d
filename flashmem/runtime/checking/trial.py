"""Trials: a launch of a kernel without the weights and activations of a model; and the verdict on one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

Size = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Global and local size of a launch."""


@dataclass(frozen=True)
class TrialArgument:
    """One argument of a launch.

    `kind` is "buffer", "image", "int" or "float". `value` of a number; `shape` of a texture: width, height and channel type;
    `nbytes` of a buffer, of which a kernel may write the first `writable`. Arguments of the same `place` are the same memory;
    that of a chain's part begins at `offset` there.
    """

    kind: str
    value: float = 0
    nbytes: int = 0
    writable: int = 0
    shape: tuple[int, int, str] = (0, 0, "")
    place: str = ""
    offset: int = 0


@dataclass(frozen=True)
class Trial:
    """One launch of one kernel. `parts`: of a chain, the launches that it is in the place of."""

    name: str
    text: str
    size: Size
    arguments: tuple[TrialArgument, ...]
    parts: tuple[Trial, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers, and texels of its textures."""
        return sum(each.nbytes + each.shape[0] * each.shape[1] for each in self.arguments)

    @property
    def key(self) -> str:
        """A hash of all that decides the result: the same launch of another model has it too."""
        places: dict[str, int] = {}
        known = [{**asdict(each), "place": places.setdefault(each.place, len(places))} for each in self.arguments]
        parts = [part.key for part in self.parts]
        return hashlib.sha256(json.dumps([self.text, self.size, known, parts]).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The trial as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trial:
        """The trial that `to_json` wrote."""
        whole, group = data["size"]
        arguments = tuple(TrialArgument(**{**each, "shape": tuple(each["shape"])}) for each in data["arguments"])
        size = tuple(whole), None if group is None else tuple(group)
        return cls(data["name"], data["text"], size, arguments, tuple(map(cls.from_json, data["parts"])))


@dataclass(frozen=True)
class Verdict:
    """The result of a check: `wrong` says what a kernel did, or is "" if all is right.

    `compared` counts elements that were compared with the interpreter, `twin` those compared with the unoptimised kernel's, or
    with what a chain's parts write.
    `whole`: all elements were. `note`: what could not be checked.
    """

    wrong: str = ""
    compared: int = 0
    twin: int = 0
    whole: bool = False
    seconds: float = 0.0
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.wrong
