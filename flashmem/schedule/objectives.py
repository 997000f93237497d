"""The objectives of plans as data: what the value of each one is, for all that read a plan.

`flashmem.planning.objectives` has the class that plans for each of them, in a module of its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Value = Literal["first run", "later run", "weighted sum"]
"""What the value of an objective counts: the seconds of a run, or W and the loading distances."""


@dataclass(frozen=True)
class ObjectiveKind:
    """An objective. `what`: what it minimises, as a phrase. `lambda_`: the default of lambda."""

    name: str
    what: str
    value: Value
    lambda_: float = 0.0

    @property
    def in_seconds(self) -> bool:
        """Whether the value is the seconds of a run. Only then do moves have a price.

        C_l limits them too where kernels move the bytes.
        """
        return self.value != "weighted sum"

    @property
    def unit(self) -> str:
        """What follows a printed value."""
        return " s" if self.in_seconds else ""


FIRST = ObjectiveKind("first", "the first answer", "first run")
STEADY = ObjectiveKind("steady", "later runs", "later run")
PAPER = ObjectiveKind("paper", "the paper's objective", "weighted sum", lambda_=0.9)

KINDS: Mapping[str, ObjectiveKind] = {each.name: each for each in (FIRST, STEADY, PAPER)}
"""The objectives by name; the first one is the default."""

AUTO = "auto"
"""What a user names to get the default."""
