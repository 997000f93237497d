"""Speculation by a small model: it drafts what a large one checks, which loads its weights once for several tokens.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; here a draft is the small model's likeliest
tokens, and the large model's sampler decides (`flashmem.runtime.generation.scheduler`).
"""

from __future__ import annotations

from collections.abc import Sequence

from flashmem.base.errors import UserError
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import UNUSED, Language
from flashmem.runtime.engine.opened import planned_variant
from flashmem.runtime.engine.replanned import fitted
from flashmem.runtime.generation.language_session import LanguageSession, RowPart
from flashmem.runtime.request.options import choose_strategy, device_here


class DraftModel:
    """A small model with the tokens of a text, of which it continues the end."""

    def __init__(self, model: LanguageSession) -> None:
        self._model = model
        self._tokens: list[int] = []
        self._knows_all = True

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        self._tokens += tokens
        self._knows_all &= all(token < len(self._model.language.tokens) for token in tokens)

    def draft(self, most: int) -> list[int]:
        """The likeliest `most` tokens after the text, each after those before.

        None if the cache has no room for them, or if the text has a token that this model lacks.
        """
        model = self._model
        count = len(self._tokens)
        text = [*self._tokens]
        if not self._knows_all or count + most > model.language.max_length:
            return []
        del model.cached[0][model.reusable(0, text) :]
        while len(text) == count or (len(text) < count + most and text[-1] not in model.language.ends):
            found = model.run({0: RowPart(*model.next_part(0, text))})
            if len(model.cached[0]) == len(text):
                text.append(int(found[0][-1].tokens[0]))
        return text[count:]


def check_same_tokens(model: Language, draft: Language) -> None:
    """Raise UserError unless both have the same tokens. One may have more of them at the end, which its texts rarely use."""
    pairs = zip(zip(model.tokens, model.types, strict=True), zip(draft.tokens, draft.types, strict=True), strict=False)
    for number, ((token, its), (other, others)) in enumerate(pairs):
        if token != other and UNUSED not in (its, others):
            raise UserError(
                f"the draft model has other tokens than the model (number {number} is {other!r}, not {token!r}); name a small "
                "model of the same family"
            )


def needed_bytes(bundle: Bundle, device: str) -> int:
    """Bytes that a session of `bundle` needs on the device, as its plans are. Raises UserError as `Session`."""
    here = device_here(device, prefer=bundle.descriptor.name)
    strategy = choose_strategy(bundle.plan, "auto")
    bundle, mode = fitted(bundle, here, "auto", strategy)
    variants = [bundle.variant(index) for index in range(len(bundle.variants))]
    return max(planned_variant(each, here, mode, strategy).needed() for each in variants)
