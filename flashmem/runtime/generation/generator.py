"""Text generation, one text at a time, by the thread that asks for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Unpack

from flashmem.base.errors import RunError
from flashmem.request.description import initialised_by
from flashmem.request.opening import GeneratorCall
from flashmem.runtime.generation.conversation import Message, model_key, read_conversation, write_conversation
from flashmem.runtime.generation.generated_text import GeneratedText, GenerationReport, Piece
from flashmem.runtime.generation.options import TextOptions
from flashmem.runtime.generation.prompts import Prompt
from flashmem.runtime.generation.text_model import TextModel


class Generator(TextModel):
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
        super().__init__(call, most_rows=1)
        self.last: GenerationReport | None = None  # of the last generation that ended
        self._current: GeneratedText | None = None

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
        pieces = deque[Piece]()
        return self._generated(self._text(prompt, pieces.append, speculate, **options), pieces)

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
        model = self._model
        self._begin(None)
        self._cached.clear()
        tokens, messages = read_conversation(Path(path), model_key(model.bundle), self.language.max_length, model.session)
        self._cached.extend(tokens)
        return messages

    def _generated(self, text: GeneratedText, pieces: deque[Piece]) -> Iterator[str]:
        self._begin(text)
        try:
            while not text.is_over:
                text.resume()
                self._scheduler.admit()
                self._scheduler.step()
                while pieces:
                    piece = pieces.popleft()
                    if isinstance(piece, Exception):
                        raise piece
                    if piece is not None:
                        yield piece
                    self._check_current(text)
        finally:
            text.is_cancelled = True
            if text is self._current:  # else a later text uses the model, and its report is `last`
                self.last = text.report()

    def _begin(self, text: GeneratedText | None) -> None:
        """End the text under way, and begin another one."""
        if self._current is not None:
            self._current.is_cancelled = True
        self._current = text
        if text is not None:
            self._scheduler.add(text)

    def _check_current(self, text: GeneratedText) -> None:
        """Raise RunError if another text has begun."""
        if text is not self._current:
            raise RunError(
                "another text was begun with this generator before this one had ended; end a text first, or open another "
                "Generator (a BatchGenerator makes several at a time)"
            )

    @property
    def _cached(self) -> list[int]:
        return self._model.cached[0]
