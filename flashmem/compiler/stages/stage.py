"""A stage of the compiler: a named step, whose result has a text form and rules that a verifier checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

from flashmem.compiler.passes.verifier import InvalidResultError

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Stage(Generic[P, Result]):
    """A stage: calling it makes its result, and verifies that.

    Attributes:
        what: its result, in a sentence.
        make: makes the result of earlier ones.
        text: the result as lines, to read and to compare with `diff`.
        verify: raises an exception that names the first broken rule.
    """

    name: str
    what: str
    make: Callable[P, Result]
    text: Callable[[Result], str]
    verify: Callable[[Result], None]

    def __call__(self, *given: P.args, **named: P.kwargs) -> Result:
        """The verified result.

        Raises:
            InvalidResultError: the result breaks a rule.
        """
        result = self.make(*given, **named)
        try:
            self.verify(result)
        except InvalidResultError as error:
            raise InvalidResultError(f"after stage {self.name}: {error}") from error
        return result
