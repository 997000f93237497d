"""GGUF files as ONNX models: weights beside gguf's own dequantisation, logits beside ONNX Runtime and float64."""

from __future__ import annotations

import itertools
import json
import os
import signal
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnxruntime
import pytest

import flashmem
from flashmem.base.errors import UserError
from flashmem.compiler.frontend.decoder.graph import write_decoder
from flashmem.compiler.frontend.decoder.kinds import decoder_of
from flashmem.compiler.frontend.decoder.weights import dequantised
from flashmem.compiler.frontend.decoder_files import converted
from flashmem.compiler.frontend.gguf.reader import GGUFFile
from tests.support.command_line import command_line
from tests.support.compared import PLACES
from tests.support.gguf_kinds import KINDS, SHOWN, TOKENS, VARIANTS
from tests.support.gguf_models import SmallLlama, plain_head, sentence_pieces, vocabulary

MODELS = {
    "blocks": SmallLlama(),
    "floats": plain_head(SmallLlama()),
    "one format": SmallLlama(layers=1, formats=("Q4_0",), table="Q4_1", head="Q8_0", key_heads=1),
    "large blocks": SmallLlama(
        formats=("Q4_K", "Q6_K", "Q2_K", "Q5_K", "Q3_K"), table="Q4_K", head="Q6_K", hidden=256, inner=256
    ),
    "minima": SmallLlama(layers=1, formats=("Q4_1",), table="Q5_1", head="Q5_0"),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_decoder(name: str, tmp_path: Path) -> None:
    """ONNX Runtime runs the file; it reads a prompt at once, and then one token at a time."""
    model, tokens = MODELS[name], [5, 17, 250, 3, 99, 260, 7, 7, 130]
    with converted(model.write(tmp_path / "m.gguf"), 64, dequantised) as read:
        session = onnxruntime.InferenceSession(read.path)
        cache = {each.name: np.zeros(each.shape, np.float32) for each in session.get_inputs() if each.name.startswith("past")}
        wanted = model.logits(tokens)
        for start, end in ((0, 5), (5, 6), (6, 7), (7, 9)):
            given = {"input_ids": np.array([tokens[start:end]]), "total_sequence_length": np.array(end, np.int32)}
            logits, *present = session.run(None, {**given, **cache})
            cache = dict(zip(cache, present, strict=True))
            assert np.abs(logits[0] - wanted[start:end]).max() < 2e-5 * np.ptp(wanted)
        more = [*tokens, 1, 2]  # of many tokens, the last has logits
        given = {"input_ids": np.array([more]), "total_sequence_length": np.array(len(more), np.int32)}
        logits, *_ = session.run(None, {**given, **cache})
        assert logits.shape[:2] == (1, 1)
        assert np.abs(logits[0, 0] - model.logits(more)[-1]).max() < 2e-5 * np.ptp(wanted)


@pytest.mark.parametrize(("kind", "place"), list(zip(KINDS, itertools.cycle(PLACES), strict=False)), ids=str)
def test_logits_are_those_of_transformers(kind: str, place: tuple[str, str], tmp_path: Path) -> None:
    """Every kind of decoder, beside transformers' reading of the same file: ONNX Runtime, and flashmem on a device."""
    file = GGUFFile(KINDS[kind].write(tmp_path / "m.gguf"))
    wanted = np.array(json.loads((Path(__file__).parent / "data" / "gguf_kinds.json").read_text())[kind])
    most = 1e-5 + 2e-5 * np.ptp(wanted)  # the first is the rounding of the file
    model, (device, path) = tmp_path / "m.onnx", place
    write_decoder(model, decoder_of(file), file, 64, dequantised)
    session = onnxruntime.InferenceSession(model)
    cache = {each.name: np.zeros(each.shape, np.float32) for each in session.get_inputs() if each.name.startswith("past")}
    shapes = [{"input_ids": (1, count)} for count in (1, 3)]
    made = flashmem.compile(
        model,
        tmp_path / "m.flashmem",
        device=device,
        memory_path=path,
        shapes=shapes,
        states="auto",  # type: ignore[arg-type]
    )
    with flashmem.Session(made, device=device) as ours:
        for start, end in ((0, 3), (3, 4), (4, 7), (7, 8), (8, 11), (11, 12)):
            given = {"input_ids": np.array([TOKENS[start:end]]), "total_sequence_length": np.array(end, np.int32)}
            logits, *present = session.run(None, {**given, **cache})
            cache = dict(zip(cache, present, strict=True))
            assert np.abs(logits[0, :, :SHOWN] - wanted[start:end]).max() < most
            [found] = ours.run(None, given)
            assert np.abs(found[0, :, :SHOWN] - wanted[start:end]).max() < most


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_parts_that_few_files_have(name: str, tmp_path: Path) -> None:
    """Beside transformers: biases of all projections, and positions that are divided by a factor."""
    file, model = GGUFFile(VARIANTS[name].write(tmp_path / "m.gguf")), tmp_path / "m.onnx"
    wanted = np.array(json.loads((Path(__file__).parent / "data" / "gguf_kinds.json").read_text())[name])
    write_decoder(model, decoder_of(file), file, 64, dequantised)
    session = onnxruntime.InferenceSession(model)
    cache = {each.name: np.zeros(each.shape, np.float32) for each in session.get_inputs() if each.name.startswith("past")}
    given = {"input_ids": np.array([TOKENS[:8]]), "total_sequence_length": np.array(8, np.int32)}
    logits = session.run(["logits"], {**given, **cache})[0]
    assert np.abs(logits[0, :, :SHOWN] - wanted[:8]).max() < 1e-5 + 2e-5 * np.ptp(wanted)


@pytest.mark.parametrize(("kind", "place"), list(zip(KINDS, itertools.cycle(PLACES), strict=False)), ids=str)
def test_rows_of_a_batch_have_places_of_their_own(kind: str, place: tuple[str, str], tmp_path: Path) -> None:
    """Two rows of every kind of decoder, of which one is behind the other, beside transformers' logits."""
    file = GGUFFile(KINDS[kind].write(tmp_path / "m.gguf"))
    wanted = np.array(json.loads((Path(__file__).parent / "data" / "gguf_kinds.json").read_text())[kind])
    write_decoder(tmp_path / "m.onnx", decoder_of(file), file, 64, dequantised, 2)
    given: Any = {"device": place[0], "memory_path": place[1], "shapes": [{"input_ids": (2, count)} for count in (1, 3)]}
    made = flashmem.compile(tmp_path / "m.onnx", tmp_path / "m.flashmem", states="auto", **given)
    with flashmem.Session(made, device=place[0]) as session:
        for count, *starts in ((3, 0, 0), (3, 3, 0), (3, 6, 3), (1, 9, 6), (1, 10, 7), (1, 11, 8)):
            ids = np.array([TOKENS[start : start + count] for start in starts])
            totals = np.array([start + count for start in starts], np.int32)
            [found] = session.run(None, {"input_ids": ids, "total_sequence_length": totals})
            assert found.shape[:2] == (2, 1)
            for row, total in enumerate(totals):
                assert np.abs(found[row, 0, :SHOWN] - wanted[total - 1]).max() < 1e-5 + 2e-5 * np.ptp(wanted)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "scales its rotary positions ('yarn'), which is not supported"),
        (
            {"formats": ("TQ1_0",), "hidden": 256, "inner": 256},
            "has the format TQ1_0, which is not supported; convert the file to one of Q4_0, Q4_1, Q5_0",
        ),
    ],
)
def test_what_is_not_supported(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = replace(SmallLlama(), **change).write(tmp_path / "m.gguf")
    with pytest.raises(UserError) as caught:
        flashmem.compile(file, tmp_path / "m.flashmem")
    assert said in str(caught.value)
    assert not (tmp_path / "m.flashmem").exists()


def test_damaged_and_foreign_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    command, file = command_line(monkeypatch, capfd), SmallLlama().write(tmp_path / "m.gguf")
    whole = file.read_bytes()
    end = whole.index(b"tokenizer.ggml.eos_token_id") + len("tokenizer.ggml.eos_token_id") + 4  # after the type of the value
    contents = {
        "no such token": whole[:end] + b"\xff\xff\0\0" + whole[end + 4 :],
        "empty": b"", "other": b"\x7fELF" * 200, "cut": whole[: len(whole) // 2], "head": whole[:700],
        "kind": whole.replace(b"llama", b"mamba"), "tokens": whole.replace(b"smollm", b"falcon"),
        "renamed": whole.replace(b"blk.1.ffn_up", b"blk.7.ffn_up"),
    }  # fmt: skip
    for name, content in contents.items():
        damaged = tmp_path / f"{name}.gguf"
        damaged.write_bytes(content)
        outcome = command("compile", damaged, "-o", tmp_path / "o.flashmem", "--device", "pocl")
        assert outcome.code == 2 and outcome.err.startswith("flashmem: ") and outcome.err.count("\n") == 1, outcome.err
        assert str(damaged) in outcome.err and not (tmp_path / "o.flashmem").exists()


@pytest.mark.parametrize(
    ("kind", "count", "nbytes"), [(0, 1 << 60, 84), (8, 1 << 60, 84), (9, 1 << 60, 84), (0, (1 << 23) + 1, 1 << 30)]
)
def test_arrays_that_a_file_does_not_hold_are_refused(kind: int, count: int, nbytes: int, tmp_path: Path) -> None:
    """The package would read empty elements for ever, or make an object of each of a billion zeros."""
    key, path = b"general.architecture", tmp_path / "m.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path.write_bytes(header + struct.pack("<IIQ", 9, kind, count) + bytes(16))
    os.truncate(path, nbytes)

    def stop(*_: object) -> None:
        raise AssertionError("it does not end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(10)
    try:
        said = rf"^{path} is no GGUF file, or a part of one \(it has an array of {count} elements\)$"
        with pytest.raises(UserError, match=said), converted(path, None):
            pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_options_that_are_known(tmp_path: Path) -> None:
    file = SmallLlama().write(tmp_path / "m.gguf")
    for options, said in (
        ({"states": "auto"}, "are known; leave out --shape, --state and --constant"),
        ({"shapes": {"input_ids": (1, 4)}}, "are known; leave out --shape, --state and --constant"),
        ({"max_length": 1000}, "max_length 1000 is not between 32 and 256, the context of"),
        ({"max_length": 8}, "max_length 8 is not between 32 and 256"),
    ):
        chosen: Any = options
        with pytest.raises(UserError, match=said):
            flashmem.compile(file, tmp_path / "m.flashmem", device="pocl", **chosen)
    other = tmp_path / "m.onnx"
    other.write_bytes(b"")
    with pytest.raises(UserError, match="--max-length is for a GGUF file"):
        flashmem.compile(other, max_length=64)


@dataclass(frozen=True)
class WithFields(SmallLlama):
    """A file with the pattern `pattern`. `named`: its first token; `adds`: the field about that. None: the field is missing."""

    pattern: str = "llama-bpe"
    named: int | None = None
    adds: bool | None = None

    def _add_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        super()._add_tokenizer(writer)
        [fields] = writer.kv_data
        for name in ("bos_token_id", "eos_token_id") if self.pieces else ():
            del fields[f"tokenizer.ggml.{name}"]
        if not self.pieces:
            del fields["tokenizer.ggml.pre"]
            writer.add_tokenizer_pre(self.pattern)
        if self.named is not None:
            writer.add_bos_token_id(self.named)
        if self.adds is not None:
            writer.add_add_bos_token(self.adds)


def test_the_token_that_begins_a_text(tmp_path: Path) -> None:
    """As llama.cpp reads files without the field about it: `llama_vocab::impl::load` in its llama-vocab.cpp."""
    pieces = sentence_pieces()[0]
    for given, begin in (
        ({"named": 3}, 3), ({"named": 3, "adds": False}, None), ({}, None), ({"named": 3, "pattern": "qwen2"}, None),
        ({"named": 3, "pattern": "gpt-2"}, None), ({"named": 3, "adds": True, "pattern": "smollm"}, 3),
        ({"pieces": True}, 1), ({"pieces": True, "named": 3}, 3), ({"pieces": True, "adds": False}, None),
    ):  # fmt: skip
        chosen: Any = given
        language = GGUFFile(WithFields(layers=1, **chosen).write(tmp_path / "m.gguf")).language()
        assert language["begin"] == begin, given
        assert "pieces" not in given or [pieces[each] for each in language["ends"]] == ["</s>", "<|end|>"]
    for given in ({"adds": True}, {"adds": True, "named": 400}):
        chosen = given
        with pytest.raises(
            UserError, match="has texts begin with a token, and does not name one; download or convert it again"
        ):
            GGUFFile(WithFields(layers=1, **chosen).write(tmp_path / "m.gguf")).language()


def test_the_vocabulary_is_in_the_bundle(tmp_path: Path) -> None:
    made = flashmem.compile(SmallLlama().write(tmp_path / "m.gguf"), tmp_path / "m.flashmem", device="pocl", max_length=64)
    language = made.language()
    assert language is not None and list(language.tokens) == vocabulary()[0] and language.max_length == 64
    assert [port.name for port in made.program.inputs] == ["input_ids", "total_sequence_length", "temperature"]
    assert [port.name for port in made.program.outputs] == ["logits", "candidates"]
    assert len(made.program.states) == 4
    assert [variant.program.inputs[0].shape[1] for variant in made.variants] == [1, 8, 32]
