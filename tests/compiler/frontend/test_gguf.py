"""GGUF files as ONNX models: weights beside gguf's own dequantisation, logits beside ONNX Runtime and float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from gguf import GGMLQuantizationType as Format
from gguf import GGUFReader, quants

import flashmem
from flashmem.base.errors import UserError
from flashmem.compiler.frontend.gguf.chat import chat_pieces
from flashmem.compiler.frontend.gguf.reader import converted
from flashmem.compiler.frontend.gguf.weights import BlockedMatrix, blocked_matrix
from tests.support.command_line import command_line
from tests.support.gguf_models import TEMPLATE, SmallLlama, plain_head, vocabulary

MODELS = {
    "blocks": SmallLlama(),
    "floats": plain_head(SmallLlama()),
    "one format": SmallLlama(layers=1, formats=("Q4_0",), table="Q4_1", head="Q8_0", key_heads=1),
}


def dequantised(matrix: BlockedMatrix) -> Any:
    """The weights, by the definition of MatMulNBits, in float32."""
    rows, depth = matrix.shape
    codes = matrix.codes
    if matrix.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1)
    blocks = codes.reshape(rows, -1, 32).astype(np.float32)
    zeros = np.float32(1 << (matrix.bits - 1)) if matrix.zeros is None else matrix.zeros[..., None]
    return ((blocks - zeros) * matrix.scales[..., None]).reshape(rows, depth)


def tensor(array: Any, kind: str, folder: Path) -> Any:
    """A tensor as `GGUFReader` reads it."""
    import gguf

    writer = gguf.GGUFWriter(folder / "t.gguf", "llama")
    writer.add_tensor("t", quants.quantize(array, Format[kind]), raw_dtype=Format[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    [read] = GGUFReader(folder / "t.gguf").tensors
    return read


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    """Bit for bit where blocks have no minimum, else within the rounding of the zero point. Blocks of equal weights too."""
    random = np.random.default_rng(0)
    array = (random.standard_normal((48, 96)) + random.integers(-3, 4, (48, 1))).astype(np.float32)
    array[:3], array[3, :32], array[4] = 0.0, 0.25, 1e-7
    read = tensor(array, kind, tmp_path)
    matrix, wanted = blocked_matrix(read), quants.dequantize(read.data, Format[kind])
    assert matrix is not None and matrix.shape == (48, 96)
    if kind == "Q4_1":
        largest = np.abs(wanted.reshape(48, 3, 32)).max(-1, keepdims=True)
        assert (np.abs(dequantised(matrix) - wanted).reshape(48, 3, 32) <= 4 * np.finfo(np.float32).eps * largest).all()
    else:
        np.testing.assert_array_equal(dequantised(matrix), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_decoder(name: str, tmp_path: Path) -> None:
    """ONNX Runtime runs the file; it reads a prompt at once, and then one word at a time."""
    model, tokens = MODELS[name], [5, 17, 250, 3, 99, 260, 7, 7, 130]
    with converted(model.write(tmp_path / "m.gguf"), 64) as read:
        session = onnxruntime.InferenceSession(read.path)
        cache = {each.name: np.zeros(each.shape, np.float32) for each in session.get_inputs() if each.name.startswith("past")}
        wanted = model.logits(tokens)
        for start, end in ((0, 5), (5, 6), (6, 7), (7, 9)):
            given = {"input_ids": np.array([tokens[start:end]]), "total_sequence_length": np.array(end, np.int32)}
            logits, *present = session.run(None, {**given, **cache})
            cache = dict(zip(cache, present, strict=True))
            assert np.abs(logits[0, 0] - wanted[end - 1]).max() < 2e-5 * np.ptp(wanted)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "scales its rotary positions ('yarn'), which is not supported"),
        ({"formats": ("Q5_0",)}, "has the format Q5_0, which is not supported; convert the file to one of Q4_0, Q4_1, Q8_0"),
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


def test_a_chat_template_in_pieces() -> None:
    pieces = chat_pieces(TEMPLATE, {})
    assert pieces is not None
    assert pieces["user"] == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
    assert pieces["system user"] == "<|im_end|>\n<|im_start|>user\n"
    llama3 = (
        "{% for m in messages %}{{ (bos_token if loop.first else '') + '<|start|>' + m['role'] + '\n\n' }}"
        "{{ m['content'] | trim + '<|eot|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\n\n' }}{% endif %}"
    )
    assert (chat_pieces(llama3, {"bos_token": "<s>"}) or {})["user"] == "<s><|start|>user\n\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
        "{% for m in messages %}{{ loop.index }}{{ m['content'] }}{% endfor %}",
        "{{ messages[0]['content'] }}",
        "{% for",
    ],
)
def test_templates_that_are_no_pieces(template: str) -> None:
    assert chat_pieces(template, {}) is None


def test_the_vocabulary_is_in_the_bundle(tmp_path: Path) -> None:
    made = flashmem.compile(SmallLlama().write(tmp_path / "m.gguf"), tmp_path / "m.flashmem", device="pocl", max_length=64)
    language = made.language()
    assert language is not None and list(language.tokens) == vocabulary()[0] and language.max_length == 64
    assert [port.name for port in made.program.inputs] == ["input_ids", "total_sequence_length"]
    assert len(made.program.states) == 4 and [variant.program.inputs[0].shape for variant in made.variants] == [(1, 1), (1, 32)]
