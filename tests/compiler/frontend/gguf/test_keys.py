"""Every key that the package gguf knows is read, has no effect, or is a reason to refuse a file.

    python -m tests.compiler.frontend.gguf.test_keys > tests/compiler/frontend/gguf/keys.txt

writes what becomes of each key.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import Keys

import flashmem
from flashmem.base.errors import UserError
from flashmem.compiler.frontend.decoder.kinds import decoder_of
from flashmem.compiler.frontend.decoder.weights import sketched
from flashmem.compiler.frontend.decoder_files import converted
from flashmem.compiler.frontend.gguf.keys import NEUTRAL, harmless_because
from flashmem.compiler.frontend.gguf.reader import GGUFFile
from tests.support.gguf_kinds import KINDS
from tests.support.gguf_models import SmallLlama

LISTED = Path(__file__).parent / "keys.txt"


def keys_of(group: type = Keys) -> Iterator[str]:
    """The keys in the package's list."""
    for name, value in vars(group).items():
        if isinstance(value, str) and not name.startswith("_"):
            yield value
        elif isinstance(value, type):
            yield from keys_of(value)


@cache
def file_of(kind: str) -> GGUFFile:
    """A file of that kind whose fields were read; those of the tokenizer are of both sorts."""
    with tempfile.TemporaryDirectory() as folder:
        file = GGUFFile(KINDS[kind].write(Path(folder) / "m.gguf"))
        for pieces in (False, True):
            other = GGUFFile(SmallLlama(layers=1, pieces=pieces).write(Path(folder) / "t.gguf"))
            file.fields = {**file.fields, **{n: field for n, field in other.fields.items() if n.startswith("tokenizer.")}}
            file.language()
        file.check_is_model()
        decoder_of(file)
        file.field(f"{kind}.context_length")
        return file


def outcome(key: str, kind: str) -> str:
    """What becomes of a key in a file of this kind, tried with a value that no key has without an effect."""
    given, file = key.format(arch=kind, id=0, name="tool_use", dense="dense_2"), file_of(kind)
    if given in file.read:
        return "read"
    if (why := harmless_because(given, kind)) is not None:
        return f"no effect: {why}"
    fields = file.fields
    file.fields = {**fields, given: SimpleNamespace(contents=lambda: "unlike any other")}
    try:
        with pytest.raises(UserError, match=f"has the field {given} with the value 'unlike any other'"):
            file.check_settings()
    finally:
        file.fields = fields
    neutral = NEUTRAL.get(key, ())
    return "refused" + (f" unless {' or '.join(map(str, neutral))}" if neutral else "")


def listed() -> str:
    """A line for each key: what becomes of it, and in files of some kinds."""
    lines = []
    for key in keys_of():
        found: dict[str, list[str]] = {}
        for kind in KINDS:
            found.setdefault(outcome(key, kind), []).append(kind)
        said = found if len(found) > 1 else {next(iter(found)): []}
        lines.append(f"{key}: " + "; ".join(f"{each} ({', '.join(kinds)})" if kinds else each for each, kinds in said.items()))
    return "\n".join(lines) + "\n"


def test_what_becomes_of_each_key() -> None:
    """A key that a new version of the package has, or that is read anew, changes the list: see that it is right."""
    assert listed() == LISTED.read_text()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"llama.rope.scaling.attn_factor": 1.2}, "has the field llama.rope.scaling.attn_factor with the value 1.2"),
        ({"llama.logit_scale": 0.5}, "has the field llama.logit_scale with the value 0.5"),
        ({"tokenizer.ggml.add_eos_token": True}, "has the field tokenizer.ggml.add_eos_token with the value True"),
        ({"llama.a_key_of_the_future": 1}, "has the field llama.a_key_of_the_future with the value 1"),
        ({"llama.expert_count": 8}, "is a mixture of experts"),
        ({"llama.rope.scaling.attn_factor": 1.0, "llama.expert_count": 0, "another.program.note": 3}, None),
    ],
)
def test_fields_with_an_effect_are_refused(fields: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    path = SmallLlama(layers=1, fields=fields).write(tmp_path / "m.gguf")
    if said is None:
        with converted(path, 64, sketched):
            return
    with pytest.raises(UserError) as caught, converted(path, 64, sketched):
        pass
    assert str(caught.value).startswith(f"{path} {said}")


@pytest.mark.parametrize(
    "name", ["blk.0.attn_norm.bias", "blk.1.attn_q.scale", "blk.0.attn_sub_norm.weight", "token_types.weight"]
)
def test_tensors_without_a_part_are_refused(name: str, tmp_path: Path) -> None:
    """Before anything is written."""
    model = SmallLlama()
    model.blocks[name] = "F32", np.ones(64, np.float32)
    path = model.write(tmp_path / "m.gguf")
    with pytest.raises(UserError, match=f"^{path} has the tensor {name}, which has no part in a model of the kind llama"):
        flashmem.compile(path, tmp_path / "m.flashmem", device="pocl")
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"general.type": "adapter", "adapter.type": "lora"}, "is an adapter (LoRA) and no whole model; merge it"),
        ({"general.type": "mmproj"}, "is the part of a model that reads images or sound"),
        ({"general.type": "imatrix"}, "is an importance matrix"),
        ({"general.type": "dataset"}, "is of the type 'dataset' and no model"),
    ],
)
def test_other_files_are_named(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = replace(SmallLlama(layers=1), fields=fields).write(tmp_path / "m.gguf")
    with pytest.raises(UserError) as caught, converted(path, 64, sketched):
        pass
    assert str(caught.value).startswith(f"{path} {said}")


def test_tokens_that_end_an_answer(tmp_path: Path) -> None:
    fields = {
        f"tokenizer.ggml.{name}_token_id": at for at, name in enumerate(("eot", "eom", "fim_pad", "fim_rep", "fim_sep"), 7)
    }
    language = GGUFFile(SmallLlama(layers=1, fields=fields).write(tmp_path / "m.gguf")).language()
    assert {7, 8, 9, 10, 11} < {*language["ends"]}


def test_files_for_computers_of_the_other_order_of_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("a", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match="is for big-endian computers"), converted(path, 64, sketched):
        pass


if __name__ == "__main__":
    print(listed(), end="")
