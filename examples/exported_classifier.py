"""A text classifier of transformers within a memory budget: its tokenizer and labels, and flashmem in place of PyTorch.

optimum-cli export onnx --model distilbert/distilbert-base-uncased-finetuned-sst-2-english --task text-classification folder
python -m examples.exported_classifier folder "What a film." --budget 64MB
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.streams import exit_codes

Tokenizer = Callable[..., Mapping[str, NDArray[Any]]]
"""A tokenizer of transformers, called with a text and how to cut and fill it."""


class Opened(Protocol):
    """What a session of flashmem and one of ONNX Runtime both have."""

    def get_inputs(self) -> Any:
        """Inputs, each with a `name`."""

    def run(self, names: Any, inputs: Any) -> Any:
        """The outputs called `names`."""


class ExportedClassifier:
    """A classifier in a folder that optimum wrote, used as optimum's ORTModelForSequenceClassification is.

    `tokens` is the length of all inputs, which the network is compiled for.
    """

    def __init__(self, session: Opened, labels: Mapping[int, str], tokens: int) -> None:
        self.session, self.labels, self.tokens = session, labels, tokens

    @classmethod
    def from_pretrained(cls, folder: Path, *, budget: str | None = None, tokens: int = 64) -> Self:
        """Compile `folder`/model.onnx, or find it in the user's cache, and open a session.

        Raises:
            UserError: no such folder, or the model cannot run within the budget.
        """
        import onnx

        import flashmem

        file, config = folder / "model.onnx", folder / "config.json"
        for needed in (file, config):
            if not needed.is_file():
                raise MissingFileError(f"{needed}: no such file; write the folder with optimum-cli export onnx")
        ports = onnx.load(str(file), load_external_data=False).graph.input
        session = flashmem.Session(file, budget=budget, shapes={port.name: (1, tokens) for port in ports})
        return cls(session, labels_in(config), tokens)

    def __call__(self, **inputs: NDArray[Any]) -> dict[str, NDArray[np.float32]]:
        """The logits of what a tokenizer returned. Inputs that the network does not have are left out."""
        given = {port.name: inputs[port.name] for port in self.session.get_inputs()}
        return {"logits": self.session.run(["logits"], given)[0]}

    def classify(self, text: str, tokenizer: Tokenizer) -> dict[str, float]:
        """The probability of each label, the likeliest first."""
        tokens = tokenizer(text, padding="max_length", truncation=True, max_length=self.tokens, return_tensors="np")
        [logits] = self(**tokens)["logits"]
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        return {self.labels[index]: float(shares[index]) for index in np.argsort(-shares).tolist()}


def labels_in(config: Path) -> dict[int, str]:
    """The names of classes in the configuration of a model. Raises UserError."""
    named = json.loads(config.read_text(encoding="utf-8")).get("id2label")
    if not named:
        raise UserError(f"{config} has no id2label: the model is no classifier")
    return {int(index): name for index, name in named.items()}


if __name__ == "__main__":
    with exit_codes():
        parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
        parser.add_argument("folder", type=Path)
        parser.add_argument("texts", nargs="+", metavar="text")
        parser.add_argument("--budget", metavar="SIZE")
        asked = parser.parse_args()
        classifier = ExportedClassifier.from_pretrained(asked.folder, budget=asked.budget)
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise UserError("the tokenizer needs transformers: pip install transformers") from error
        words = AutoTokenizer.from_pretrained(asked.folder)
        for line in asked.texts:
            print(", ".join(f"{label} {share:.0%}" for label, share in classifier.classify(line, words).items()) + f"  {line}")
