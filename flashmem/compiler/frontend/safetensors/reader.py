"""A folder of the library transformers with weights in safetensors, as a `DecoderFile`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from flashmem.base.errors import UserError
from flashmem.compiler.frontend.decoder.file import DecoderFile
from flashmem.compiler.frontend.decoder.weights import FileTensor, floats, stored_floats
from flashmem.compiler.frontend.language.folder_settings import CONFIG, FolderSettings
from flashmem.compiler.frontend.safetensors.kinds import FolderKind, hyperparameters, kind_of, role_of
from flashmem.compiler.frontend.safetensors.settings import Settings
from flashmem.compiler.frontend.safetensors.shards import Shards

_HEAD = "output.weight"
_REPEATED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors of old files that repeat what settings say."""


class SafetensorsFolder(DecoderFile):
    """The settings and tensors of a folder: `config.json` and `model.safetensors`, or its index and the files that it names."""

    interleaved = False

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._folder = FolderSettings(path)
            self._settings = Settings(self._folder.config, path / CONFIG)
            if self._folder.has_parts:
                raise UserError(f"{path} is a model of more than text, which is not supported; use a GGUF file of its decoder")
            kind = kind_of(self._settings)
            self.kind = kind.name
            self._values = hyperparameters(self._settings, kind)
        except UserError:
            raise
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise self.damage(error) from error
        self._shards = Shards(path)
        self.tensors = self._by_role(kind)
        self.files = (*self._folder.files, *self._shards.files)

    def value(self, name: str, default: Any = None) -> Any:
        """See `DecoderFile`."""
        found = self._values.get(name, default)
        if found is None:
            raise UserError(f"{self.path / CONFIG} does not say {name}")
        return found

    def check_is_model(self) -> None:
        """See `DecoderFile`: the settings say so."""

    def check_settings(self) -> None:
        """See `DecoderFile`."""
        self._settings.check()

    def language(self) -> dict[str, Any]:
        """See `DecoderFile`."""
        made = self._folder.language(self.tensor("token_embd.weight").shape[0])
        self.files = (*self._folder.files, *self._shards.files)
        return made

    def damage(self, error: Exception) -> UserError:
        """See `DecoderFile`."""
        return UserError(f"a file in {self.path} is damaged, or of an unknown kind ({type(error).__name__}: {error})")

    def read_little(self) -> None:
        """See `DecoderFile`."""
        self._shards.read_little()

    def _by_role(self, kind: FolderKind) -> dict[str, FileTensor]:
        """The tensors by role; one without a known role has its own name."""
        found: dict[str, FileTensor] = {}
        for name, tensor in self._shards.tensors.items():
            if not _REPEATED.fullmatch(name):
                role = role_of(name, kind) or name
                is_less = kind.is_gemma and role.endswith("_norm.weight")
                found[role] = stored_floats(name, floats(tensor) + 1) if is_less else tensor
        if self._settings.take("tie_word_embeddings", _HEAD not in found):
            found.pop(_HEAD, None)
        elif _HEAD not in found:
            raise UserError(f"{self.path} lacks the tensor lm_head.weight; download it again")
        if "rope_freqs" in self._values:
            found["rope_freqs.weight"] = stored_floats("rope_freqs", self._values["rope_freqs"])
        return found
