"""The options of a generation: how a text is generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypedDict, Unpack

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
    `template_arguments`: names for the chat template of messages, such as `enable_thinking`.
    """

    max_new_tokens: int
    stop: str | Sequence[str]
    template_arguments: Mapping[str, Any] | None


@dataclass(frozen=True)
class TextRequest:
    """How a text is generated: at most `max_new_tokens`, until one of `stop`, each token chosen by `sampling`.

    `template_arguments`: for the chat template of messages.
    """

    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def resolved(
        cls,
        recommended: Mapping[str, float] | None = None,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        template_arguments: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Self:
        """From the keywords of `TextOptions`. `recommended`: what the model recommends where a keyword of sampling is missing.

        Raises:
            UserError: a number out of range.
            TypeError: an unknown keyword.
        """
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise UserError(f"max_new_tokens {max_new_tokens!r} is not possible; give a whole number that is 1 or more")
        chosen: Any = {**(recommended or {}), **sampling}
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return cls(max_new_tokens, Sampling(**chosen), stops, template_arguments or {})
