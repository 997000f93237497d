"""Text generation: a session whose states are the cache of keys and values, one token after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from flashmem.base.errors import RunError, UserError
from flashmem.bundle.bundle import Bundle
from flashmem.request.description import initialised_by
from flashmem.request.opening import GeneratorCall, SessionRequest
from flashmem.runtime.generation.conversation import Message, model_key, read_conversation, write_conversation
from flashmem.runtime.generation.draft_model import DraftModel, check_same_tokens, needed_bytes
from flashmem.runtime.generation.generated_text import GeneratedText, GenerationReport
from flashmem.runtime.generation.language_session import LanguageSession
from flashmem.runtime.generation.options import TextOptions, TextRequest
from flashmem.runtime.generation.prompts import Prompt, tokens_of
from flashmem.runtime.generation.speculation import Drafter, Lookup, Payoff
from flashmem.runtime.generation.steps import Steps
from flashmem.runtime.generation.tokenizer import Tokenizer


class Generator:
    """Generates text with a language model. A context manager; not for several threads at once.

    The cache keeps what was read and generated. Of a prompt that begins in the same way, only the rest is read.
    """

    @initialised_by(GeneratorCall)
    def __init__(self, call: GeneratorCall) -> None:
        """Open a session.

        Raises:
            UserError: no bundle, or one of another model; other tokens; and the errors of `Session`.
            RunError: the device refuses.
        """
        self._draft, self._draft_bytes = None, 0
        if call.draft is not None and call.process_memory is not None:
            raise UserError("the process memory is for one model; give a budget for a model with a draft")
        opening = call.given_as(SessionRequest)
        with ExitStack() as opened:
            if call.draft is not None:
                draft = call.draft if isinstance(call.draft, Bundle) else Bundle.open(call.draft)
                self._draft_bytes = needed_bytes(draft, call.device)
                small = SessionRequest(device=call.device, budget=self._draft_bytes)
                self._draft = opened.enter_context(LanguageSession(draft, small))
                if call.budget is not None:
                    opening = opening.replace(budget=max(0, call.budget - self._draft_bytes))
            self._model = opened.enter_context(LanguageSession(call.bundle, opening))
            if self._draft is not None:
                check_same_tokens(self._model.language, self._draft.language)
            self._opened = opened.pop_all()
        self.language = self._model.language
        self.tokenizer = Tokenizer(self.language)
        self._payoffs = Payoff(), Payoff()  # of drafts from the text, and of those of the draft model
        self.last: GenerationReport | None = None  # of the last generation that ended
        self._text = object()  # another one for each text

    def generate(self, prompt: Prompt, *, speculate: bool = True, **options: Unpack[TextOptions]) -> Iterator[str]:
        """Continue a text, or answer a conversation; yields the new text in pieces, as it is generated.

        It ends at the model's own end, at one of the texts `stop` (which is not yielded), after `max_new_tokens`, or when the
        cache is full. Afterwards `last` has the report. It also ends when the next text begins, with an error for who still
        asks for more: both have the same cache.

        Args:
            prompt: a text to continue; messages, of which the last is the user's; or tokens.
            speculate: check drafts of several tokens in one run where the text repeats itself and that saves time.
            options: `max_new_tokens` (256 by default), `stop`, `template_arguments` (names for the chat template, such as
                `enable_thinking`), and `temperature`, `top_k`, `top_p`, `repetition_penalty` and `seed`
                (`flashmem.runtime.generation.sampling.Sampling`). The default is what the model recommends, or else takes the
                likeliest token.

        Raises:
            UserError: a number out of range; a prompt without tokens, with unknown ones, or longer than the cache; messages
                that the chat template does not take.
            RunError: a run fails, or gives no numbers. Or another text has begun since.
        """
        request = TextRequest.resolved(self.language.sampling, **options)
        tokens = self.tokens_of(prompt, request.template_arguments)
        return self._generated(GeneratedText(self.language, self.tokenizer, request, tokens), speculate)

    def tokens_of(self, prompt: Prompt, template_arguments: Mapping[str, Any] | None = None) -> list[int]:
        """The tokens of a prompt, as `generate` reads them. Raises UserError."""
        return tokens_of(prompt, self.language, self.tokenizer, template_arguments)

    def save(self, path: str | Path, messages: Sequence[Message] = ()) -> None:
        """Save the cache, and the `messages` of its conversation, to a file (.npz), whole or not at all.

        Raises:
            OSError: the file cannot be written.
            RunError: the device fails.
        """
        write_conversation(Path(path), model_key(self._model.bundle), self._cached, messages, self._model.session)

    def restore(self, path: str | Path) -> list[Message]:
        """Continue with a saved cache; returns the messages that were saved with it.

        Raises:
            UserError: the file is damaged, or of another model.
            RunError: the device fails.
        """
        model, length = self._model, self.language.max_length
        model.cached = []
        model.cached, messages = read_conversation(Path(path), model_key(model.bundle), length, model.session)
        return messages

    def _generated(self, made: GeneratedText, speculate: bool) -> Iterator[str]:
        mine, model = object(), self._model
        self._text = mine
        made.resume()
        made.reused = model.reusable(made.tokens)
        drafters: list[Drafter] = [Lookup(), *([DraftModel(self._draft)] if self._draft is not None else [])]
        steps = Steps(model, [*zip(drafters, self._payoffs, strict=False)] if speculate else [])
        model.temperature = made.summed_at
        try:
            candidates = model.read(made.tokens, made.reused)
            while True:
                if text := made.follow(candidates, steps.nbytes):
                    yield text
                    self._check_current(mine)
                    made.resume()
                if made.is_over:
                    break
                candidates = steps.after(made.tokens[-1])
            if text := made.rest():
                yield text
        finally:
            if mine is self._text:  # else a later text uses the model, and its report is `last`
                steps.finish()
                run = model.session.last_run
                peak_bytes = (run.memory.peak_bytes if run is not None else 0) + self._draft_bytes
                self.last = made.report(peak_bytes, steps.drafted, steps.accepted)

    def _check_current(self, text: object) -> None:
        """Raise RunError if another text has begun."""
        if text is not self._text:
            raise RunError(
                "another text was begun with this generator before this one had ended; end a text first, or open another "
                "Generator (a BatchGenerator makes several at a time)"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the session, and that of the draft model."""
        self._opened.close()

    @property
    def _cached(self) -> list[int]:
        return self._model.cached
