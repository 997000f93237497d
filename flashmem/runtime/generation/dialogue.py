"""A conversation that goes on: a full cache forgets the oldest turns, and an answer that is ended early is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Unpack

from flashmem.runtime.generation.conversation import Message
from flashmem.runtime.generation.generator import Generator
from flashmem.runtime.generation.options import TextOptions, TextRequest
from flashmem.runtime.generation.prompts import PromptTooLongError

_KEPT = 2
"""After the oldest turns were forgotten, the rest takes at most this part of the cache, so that the next turns are not read
again."""

_ANSWER = 4
"""The least part of the cache that is free for an answer."""


class Dialogue:
    """Messages with a generator, which answers the last one.

    `messages`: what was said so far; `forgotten`: how many of them the last answer no longer knew.
    """

    def __init__(self, generator: Generator, messages: Sequence[Message] = ()) -> None:
        self.messages = list(messages)
        self.forgotten = 0
        self._generator = generator

    def ask(self, content: str, *, speculate: bool = True, **options: Unpack[TextOptions]) -> Iterator[str]:
        """Answer a message; yields the answer in pieces. However it ends, what was said until then is in `messages`.

        Where cache and answer would not hold all messages, the oldest ones are forgotten, but not those of the system at the
        beginning.

        Raises:
            UserError: the message alone is too long, or the chat template refuses it; `messages` are as before.
            RunError: as `Generator.generate`.
        """
        asked: list[Message] = [*self.messages, {"role": "user", "content": content}]
        kept = self._remembered(asked, options)
        pieces = self._generator.generate(kept, speculate=speculate, **options)
        said: list[str] = []
        try:
            for piece in pieces:
                said.append(piece)
                yield piece
        finally:
            if said:
                self.forgotten = len(asked) - len(kept)
                self.messages = [*kept, {"role": "assistant", "content": "".join(said)}]

    def _remembered(self, messages: list[Message], options: TextOptions) -> list[Message]:
        """The messages that fit: all, or the system's and the last turns. Raises UserError if not even the last one does."""
        length = self._generator.language.max_length
        most = length - min(TextRequest.resolved(**options).max_new_tokens, length // _ANSWER)
        turns = [at for at, message in enumerate(messages) if message["role"] == "user"]
        for first in turns[:-1]:
            kept = [*messages[: turns[0]], *messages[first:]]
            with suppress(PromptTooLongError):
                if len(self._generator.tokens_of(kept, options.get("template_arguments"))) <= most:
                    return kept
            most = min(most, length // _KEPT)
        return [*messages[: turns[0]], *messages[turns[-1] :]]
