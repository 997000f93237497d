"""Designs of an application, and the policy that switches between them, as `flashmem design` writes them (`design.json`)."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashmem.base.errors import BundleError, MissingFileError

FILE = "design.json"
VERSION = 1


@dataclass(frozen=True)
class TaskAssignment:
    """The assignment of one task in a design: a bundle (its folder's name next to the file), a device and its processor.

    Also the bytes and the median seconds of the task when it runs alone.
    """

    task: str
    bundle: str
    device: str
    processor: str
    memory: int
    seconds: float


@dataclass(frozen=True)
class Design:
    """One configuration of the application. `roles`: the reasons why it was kept."""

    roles: tuple[str, ...]
    parts: tuple[TaskAssignment, ...]

    @property
    def memory(self) -> int:
        """Bytes of all tasks together."""
        return sum(part.memory for part in self.parts)


@dataclass(frozen=True)
class DeviceState:
    """State of the device: processors that are in trouble, and whether memory is short."""

    troubled: frozenset[str] = frozenset()
    memory: bool = False


@dataclass(frozen=True)
class SwitchingRule:
    """A row of the policy: the design for a state. `sets`: whether each set of processors is in trouble; `memory`: whether
    memory is short. None matches both.
    """

    sets: tuple[bool | None, ...]
    memory: bool | None
    design: int


@dataclass(frozen=True)
class Designs:
    """The designs of an application, with the rules that switch between them.

    `sets`: sets of processors, as rules name them. A set is in trouble if one of its processors is.
    """

    sets: tuple[tuple[str, ...], ...]
    designs: tuple[Design, ...]
    policy: tuple[SwitchingRule, ...]

    def choose(self, state: DeviceState) -> int:
        """The design for a state, by the first matching rule; it depends on nothing else (CARIn, section 4.3.4)."""
        troubled = [bool(state.troubled.intersection(each)) for each in self.sets]
        asked = (*troubled, state.memory)
        for rule in self.policy:
            if all(wanted is None or wanted == so for wanted, so in zip((*rule.sets, rule.memory), asked, strict=True)):
                return rule.design
        raise AssertionError("a policy has a rule for every state")

    def to_json(self) -> dict[str, Any]:
        """The content of `design.json` as plain data."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def read(cls, folder: Path) -> Designs:
        """The designs in `folder`.

        Raises:
            MissingFileError: no such file.
            BundleError: the file is damaged, or has another version.
        """
        path = folder / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise MissingFileError(f"{path}: no such file; `flashmem design` writes it") from error
        except (ValueError, UnicodeDecodeError) as error:
            raise BundleError(f"{path} is damaged: {error}; run `flashmem design` again") from error
        if not isinstance(data, dict) or data.get("version") != VERSION:
            raise BundleError(f"{path} is of another version than {VERSION}; run `flashmem design` again")
        try:
            found = cls(
                tuple(tuple(map(str, each)) for each in data["sets"]),
                tuple(
                    Design(tuple(map(str, each["roles"])), tuple(TaskAssignment(**part) for part in each["parts"]))
                    for each in data["designs"]
                ),
                tuple(SwitchingRule(tuple(each["sets"]), each["memory"], int(each["design"])) for each in data["policy"]),
            )
            found._check()
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"{path} is damaged: {error!r}; run `flashmem design` again") from error
        return found

    def processors(self) -> Collection[str]:
        """The processors used by all designs."""
        return {part.processor for design in self.designs for part in design.parts}

    def _check(self) -> None:
        last = self.policy[-1]
        if any(len(rule.sets) != len(self.sets) or not 0 <= rule.design < len(self.designs) for rule in self.policy):
            raise ValueError("a rule names an unknown set or design")
        if any(Path(part.bundle).name != part.bundle for design in self.designs for part in design.parts):
            raise ValueError("a bundle is not next to the file")
        if any(each is not None for each in last.sets) or last.memory is not True:
            raise ValueError("the last rule is not the one for little memory")
