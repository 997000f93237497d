"""Conversations in files: the tokens in a cache, the filled part of its states, and the messages, as an .npz file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import WEIGHTS_KEY
from flashmem.runtime.engine.inputs import write_npz
from flashmem.runtime.session import Session

Message = Mapping[str, str]
"""A message of a conversation: `role` ("system", "user" or "assistant") and `content`."""

_ABOUT = "about"
_TOKENS = "tokens"


def model_key(bundle: Bundle) -> str:
    """A key of the model in `bundle`: what its weights are, and the types and shapes of its states but for their length."""
    [first, *_] = bundle.variants
    states = [(state.name, (*state.shape[:2], *state.shape[3:]), state.dtype) for state in first.program.states]
    weights = bundle.common.get(WEIGHTS_KEY) or list(first.checksums.all())
    return hashlib.sha256(repr((weights, states)).encode()).hexdigest()


def write_conversation(path: Path, model: str, tokens: Sequence[int], messages: Sequence[Message], session: Session) -> None:
    """Write the conversation to `path`; the states pass through memory one by one.

    Raises:
        OSError: the file cannot be written.
        RunError: the device fails.
    """
    about = json.dumps({"model": model, "messages": [dict(each) for each in messages]}).encode()

    def arrays() -> Iterator[tuple[str, NDArray[Any]]]:
        yield _ABOUT, np.frombuffer(about, np.uint8)
        yield _TOKENS, np.array(tokens, np.int64)
        for state in session.bundle.program.states:
            [array] = session.states(state.name).values()
            yield state.name, array[:, :, : len(tokens)]

    write_npz(path, arrays())


def read_conversation(path: Path, model: str, length: int, session: Session) -> tuple[list[int], list[Message]]:
    """Set the states of `session` to those in `path`; returns the tokens in the cache, and the messages.

    Raises:
        UserError: the file is damaged, or of another model.
        RunError: the device fails.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            about = json.loads(stored[_ABOUT].tobytes())
            if about["model"] != model:
                raise UserError(f"{path} is a conversation with another model, or one whose cache has another --kv")
            tokens = [int(each) for each in stored[_TOKENS]]
            messages: list[Message] = [
                {"role": str(each["role"]), "content": str(each["content"])} for each in about["messages"]
            ]
            if min(tokens, default=0) < 0:
                raise ValueError("a token below 0")
            if len(tokens) > length:
                raise UserError(
                    f"{path} is a conversation of {len(tokens)} tokens, and the cache holds {length}; compile the model with a "
                    "larger --max-length"
                )
            for state in session.bundle.program.states:
                whole = np.zeros(state.shape, state.dtype)
                whole[:, :, : len(tokens)] = stored[state.name]
                session.set_states({state.name: whole})
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except UserError:
        raise
    except Exception as error:  # numpy and zipfile raise any kind for damaged files
        said = " ".join(str(error).split())
        raise UserError(f"{path} is no saved conversation, or a part of one ({said}); remove it or name another") from error
    return tokens, messages
