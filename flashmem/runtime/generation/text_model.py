"""A language model that is open for texts: what generators of one text and of several have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, Unpack

from flashmem.base.errors import UserError
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import CHECKED_TOKENS
from flashmem.request.opening import GeneratorCall, SessionRequest
from flashmem.runtime.generation.draft_model import DraftModel, check_same_tokens, needed_bytes
from flashmem.runtime.generation.generated_text import GeneratedText, Piece
from flashmem.runtime.generation.language_session import LanguageSession, language_of, rows_in
from flashmem.runtime.generation.options import TextOptions, TextRequest
from flashmem.runtime.generation.prompts import Prompt, tokens_of
from flashmem.runtime.generation.scheduler import Scheduler
from flashmem.runtime.generation.speculation import Drafter, Drafts, Lookup, Payoff
from flashmem.runtime.generation.tokenizer import Tokenizer
from flashmem.runtime.request.models import bundle_for


class TextModel:
    """A language model with its tokenizer, a small one that drafts for it if there is one, and the scheduler of its texts."""

    def __init__(self, call: GeneratorCall, most_rows: int | None = None) -> None:
        """Open the sessions. `most_rows`: of the batch; None for any.

        Raises:
            UserError: no bundle, or one of another model; other tokens; too many rows; and the errors of `Session`.
            RunError: the device refuses.
        """
        if call.draft is not None and call.process_memory is not None:
            raise UserError("the process memory is for one model; give a budget for a model with a draft")
        opening = call.given_as(SessionRequest)
        draft = None
        draft_bytes = 0
        if call.draft is not None:
            draft = call.draft if isinstance(call.draft, Bundle) else Bundle.open(call.draft)
            draft_bytes = needed_bytes(draft, call.device)
            if call.budget is not None:
                opening = opening.replace(budget=max(0, call.budget - draft_bytes))
        bundle = bundle_for(call.bundle, opening, build=True)
        self.language = language_of(bundle)
        rows = rows_in(bundle)
        if most_rows is not None and rows > most_rows:
            raise UserError(
                f"{bundle.path} answers {rows} requests at a time; open it with flashmem.BatchGenerator or flashmem serve, or "
                "compile the model without --batch"
            )
        self._draft = None
        with ExitStack() as opened:
            if draft is not None:
                if rows > 1:
                    raise UserError("a batch makes no drafts; leave the draft model out, or compile the model without --batch")
                check_same_tokens(self.language, language_of(draft))
                small = SessionRequest(device=call.device, budget=draft_bytes)
                self._draft = opened.enter_context(LanguageSession(draft, small))
            self._model = opened.enter_context(LanguageSession(bundle, opening))
            self._opened = opened.pop_all()
        self.tokenizer = Tokenizer(self.language)
        self._scheduler = Scheduler(self._model, draft_bytes)
        self._payoffs = Payoff(), Payoff()  # of drafts from the text, and of those of the draft model

    @property
    def rows(self) -> int:
        """The texts that are generated at a time."""
        return len(self._model.cached)

    def tokens_of(self, prompt: Prompt, template_arguments: Mapping[str, Any] | None = None) -> list[int]:
        """The tokens of a prompt, as `generate` reads them. Raises UserError."""
        return tokens_of(prompt, self.language, self.tokenizer, template_arguments)

    def close(self) -> None:
        """Close the session, and that of the draft model."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _text(
        self, prompt: Prompt, put: Callable[[Piece], None], speculate: bool, **options: Unpack[TextOptions]
    ) -> GeneratedText:
        """A text for the scheduler, whose pieces `put` gets. Raises UserError."""
        request = TextRequest.resolved(self.language.sampling, **options)
        tokens = self.tokens_of(prompt, request.template_arguments)
        drafts = None
        if speculate and self.rows == 1 and CHECKED_TOKENS in self._model.lengths:
            drafters: list[Drafter] = [Lookup(), *([DraftModel(self._draft)] if self._draft is not None else [])]
            drafts = Drafts(self.language, [*zip(drafters, self._payoffs, strict=False)])
        return GeneratedText(self.language, self.tokenizer, request, tokens, put, drafts)
