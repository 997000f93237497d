"""The options of a generation: how a text is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypedDict, Unpack

from flashmem.base.errors import UserError
from flashmem.runtime.generation.sampling import Sampling


class SamplingOptions(TypedDict, total=False):
    """Keywords of `flashmem.runtime.generation.sampling.Sampling`. The default takes the likeliest token."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    seed: int | None


class TextOptions(SamplingOptions, total=False):
    """Keywords of a generation.

    `max_new_tokens`: the most tokens to generate, 256 by default. `stop`: texts that end it, and are not yielded.
    """

    max_new_tokens: int
    stop: str | Sequence[str]


@dataclass(frozen=True)
class TextRequest:
    """How a text is generated: at most `max_new_tokens`, until one of `stop`, each token chosen by `sampling`."""

    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]

    @classmethod
    def resolved(
        cls, *, max_new_tokens: int = 256, stop: str | Sequence[str] = (), **sampling: Unpack[SamplingOptions]
    ) -> Self:
        """From the keywords of `TextOptions`.

        Raises:
            UserError: a number out of range.
            TypeError: an unknown keyword.
        """
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise UserError(f"max_new_tokens {max_new_tokens!r} is not possible; give a whole number that is 1 or more")
        return cls(max_new_tokens, Sampling(**sampling), (stop,) if isinstance(stop, str) else tuple(stop))
