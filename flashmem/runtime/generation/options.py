"""The options of `Generator` and `BatchGenerator`: how they are opened, and how a text is generated, each resolved once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack, cast

from flashmem.base.errors import UserError
from flashmem.base.types import TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.runtime.generation.sampling import Sampling
from flashmem.runtime.request.models import ModelOptions, bundle_for
from flashmem.runtime.session import Session


class OpeningOptions(ModelOptions, total=False):
    """Keywords with which a language model is opened.

    Those of `Session` with the same names; for a model instead of a bundle also those of `flashmem.compile`, such as
    `max_length`.
    """

    device: str
    budget: int | str | None
    host_budget: int | str | None
    process_memory: int | str | None
    mode: TransferMode | Literal["auto"]


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
class ModelOpening:
    """How a language model is opened; the fields are those of `OpeningOptions`, `model` those for a model."""

    device: str = "auto"
    budget: int | str | None = None
    host_budget: int | str | None = None
    process_memory: int | str | None = None
    mode: TransferMode | Literal["auto"] = "auto"
    model: ModelOptions = field(default_factory=ModelOptions)

    @classmethod
    def resolved(cls, **options: Unpack[OpeningOptions]) -> Self:
        """From keywords. Unknown ones are in `model`, which `bundle` refuses."""
        own = cls.__dataclass_fields__.keys() & options.keys() - {"model"}
        rest = {name: value for name, value in options.items() if name not in own}
        return cls(**{name: options[name] for name in own}, model=cast(ModelOptions, rest))  # type: ignore[literal-required]

    def bundle(self, given: Bundle | str | Path) -> Bundle:
        """The bundle that `given` is, or is compiled to. Raises as `bundle_for`."""
        return bundle_for(
            given,
            device=self.device,
            mode=self.mode,
            strategy="auto",
            budget=self.budget,
            host_budget=self.host_budget,
            build=True,
            options=self.model,
        )

    def session(self, bundle: Bundle) -> Session:
        """A session of `bundle`. Raises as `Session`."""
        return Session(
            bundle,
            device=self.device,
            budget=self.budget,
            host_budget=self.host_budget,
            process_memory=self.process_memory,
            mode=self.mode,
        )


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
