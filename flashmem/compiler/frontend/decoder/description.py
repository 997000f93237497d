"""What a decoder is: the numbers that its graph follows from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: angles are position * `base` ** (-2 i / `size`) / `factor` for pair i of `size` / 2."""

    size: int
    base: float
    factor: float = 1.0


@dataclass(frozen=True)
class Decoder:
    """What a kind of model and its file say about the decoder.

    Attributes:
        size: elements of a head.
        epsilon: of the normalisations.
        rotary: positions of each layer.
        windows: keys that a query of each layer sees, itself included; 0 for all of them.
        interleaved: neighbouring elements of a head rotate, as in GGUF files of the kind llama; otherwise one of each half.
        gelu: the activation is GELU (by tanh) instead of SiLU.
        embedding_scale: of the tokens' embeddings.
        scale: of the scores.
        score_cap, logit_cap: numbers are bounded softly to this; 0 for no bound.
    """

    layers: int
    hidden: int
    heads: int
    key_heads: int
    size: int
    vocabulary: int
    epsilon: float
    rotary: Sequence[Rotary]
    windows: Sequence[int]
    interleaved: bool = False
    gelu: bool = False
    embedding_scale: float = 1.0
    scale: float = 0.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
