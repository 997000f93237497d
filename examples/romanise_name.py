"""How is an Arabic name written in Latin letters? A GRU encoder and a decoder with attention (UNICEF, MIT), letter by letter.

python -m examples.romanise_name NAME [COUNTRY]      # such as EG for Egypt: spellings differ
"""

from __future__ import annotations

import json

import numpy as np

from examples.trained import Run, Trained, command, find, runner
from flashmem.base.errors import UserError
from flashmem.base.streams import exit_codes

_LETTERS = 24  # of a name at most, with its country, role and end
_BESIDE = 3  # country, role and end
_START, _END = 1, 2  # numbers of tokens
_LONGEST = 32  # Latin letters

ENCODER = Trained("arabic_name_romanizer", "resources/encoder.onnx", {"src": (1, _LETTERS), "src_mask": (1, _LETTERS)}, "2MB")
DECODER = Trained(
    "arabic_name_romanizer",
    "resources/decoder.onnx",
    {"prefix": (1, 1), "memory": (1, _LETTERS, 256), "src_mask": (1, _LETTERS), "hidden": (1, 2, 256)},
    "4MB",
)


def romanise(name: str, encode: Run, decode: Run, country: str | None = None) -> str:
    """The most likely spelling of `name`, one letter after the other; each is given back to the decoder with its state.

    Raises:
        UserError: the name is too long, or the network was not trained on the country.
        FileNotFoundError: the file of letters is missing.
    """
    tokens = json.loads(find("arabic_name_romanizer", "resources/vocab.json").read_text(encoding="utf-8"))["tokens"]
    number = {token: index for index, token in enumerate(tokens)}
    if (of := f"<{country or 'UNK_COUNTRY'}>") not in number:
        raise UserError(
            f"the network was not trained on country {country!r}; name one by two capital letters, such as EG, or none"
        )
    if len(name) > _LETTERS - _BESIDE:
        raise UserError(f"{name!r} has {len(name)} letters; the network takes {_LETTERS - _BESIDE} at most")
    prefix = [number[of], number["<ROLE_UNKNOWN>"]]
    source = np.zeros((1, _LETTERS), np.int64)
    source[0, : len(name) + _BESIDE] = [*prefix, *(number.get(letter, number["<UNK>"]) for letter in name), _END]
    nothing = source == 0
    memory, _, hidden = encode({"src": source, "src_mask": nothing})
    written, last = [], _START
    for _ in range(_LONGEST):
        scores, hidden = decode({"prefix": np.array([[last]]), "memory": memory, "src_mask": nothing, "hidden": hidden})
        last = int(scores.argmax())
        if last == _END:
            break
        written.append(tokens[last])
    return "".join(written)


if __name__ == "__main__":
    with exit_codes():
        parser = command(__doc__)
        parser.add_argument("name", help="in Arabic letters")
        parser.add_argument("country", nargs="?", help="two letters, such as EG: spellings differ")
        given = parser.parse_args()
        with ENCODER.open() as encoder, DECODER.open() as decoder:
            print(romanise(given.name, runner(encoder), runner(decoder), given.country))
