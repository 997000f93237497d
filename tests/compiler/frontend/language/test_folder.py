"""Language models in folders of onnxruntime-genai and optimum, beside ONNX Runtime with the same files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

import flashmem
from flashmem.base.errors import MissingFileError, UserError
from flashmem.compiler.frontend.language.folder import read_folder
from tests.support.command_line import command_line
from tests.support.compared import DEVICES
from tests.support.language_folders import EXPORTED, merged, reference, unpack

MARGIN = 1e-3
"""Of the logits' range: where the two best are nearer, a rounding error may decide."""

PROMPT = [3 + (37 * number) % 380 for number in range(45)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def copied(folders: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a folder, to be changed."""
    return lambda name: shutil.copytree(folders / name, tmp_path / name)


def generated(folder: Path, **options: Any) -> list[int]:
    """Tokens after the prompt: read in two runs, then one by one and by drafts."""
    bundle = flashmem.compile(folder, folder.with_suffix(".flashmem"), max_length=96, **options)
    with flashmem.Generator(bundle, device=options.get("device", "auto")) as generator:
        list(generator.generate(PROMPT, max_new_tokens=40))
        return generator._cached[len(PROMPT) :]


def check(tokens: list[int], folder: Path) -> None:
    expected = reference(folder, PROMPT, 40)
    equal = next((at for at, (token, (other, _)) in enumerate(zip(tokens, expected, strict=False)) if token != other), None)
    assert len(tokens) > 20
    assert equal is None or expected[equal][1] < MARGIN, (equal, tokens, expected)
    assert equal is None or equal > 10  # most of the comparison took place


CASES = [("genai", place) for place in DEVICES] + [(name, DEVICES[at % len(DEVICES)]) for at, name in enumerate(EXPORTED)]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_the_likeliest_tokens(name: str, place: tuple[str, str], copied: Callable[[str], Path]) -> None:
    folder = copied(name)
    check(generated(folder, device=place[0], memory_path=place[1]), folder)


def test_a_merged_decoder(copied: Callable[[str], Path], folders: Path) -> None:
    """Both branches have a cache here; the one for an empty cache is not read."""
    folder = copied("llama")
    merged(folder)
    check(generated(folder), folders / "llama")


BATCHED = [PROMPT, PROMPT[:9], PROMPT[3:8], PROMPT[20:], PROMPT[::-1], PROMPT[:1]]
"""More requests than rows, of different lengths."""


@pytest.mark.parametrize(("name", "place"), CASES)
def test_several_requests_at_a_time(name: str, place: tuple[str, str], copied: Callable[[str], Path]) -> None:
    """Each request of a batch has the text that it has alone, and ONNX Runtime's likeliest tokens for it."""
    folder, (device, path) = copied(name), place
    options: dict[str, Any] = {"max_length": 96, "batch": 3, "device": device, "memory_path": path}
    bundle = flashmem.compile(folder, folder.with_suffix(".flashmem"), **options)
    compared = 0
    with flashmem.BatchGenerator(bundle, device=device) as generator:
        apart = ["".join(generator.generate(prompt, max_new_tokens=30)) for prompt in BATCHED]
        begun = [generator.generate(prompt, max_new_tokens=30) for prompt in BATCHED]
        assert ["".join(each) for each in begun] == apart
        for prompt, text in zip(BATCHED, apart, strict=True):
            sure = takewhile(lambda each: each[1] >= MARGIN, reference(folder, prompt, 30))
            tokens = [*takewhile(lambda token: token not in generator.language.ends, (token for token, _ in sure))]
            wanted = generator.tokenizer.decode(tokens).decode(errors="replace").rstrip("\ufffd")
            assert text.startswith(wanted)
            compared += len(tokens)
    assert compared > 90


def test_folders_that_cannot_be_batched(copied: Callable[[str], Path], tmp_path: Path) -> None:
    def refused(name: str, change: Callable[[onnx.GraphProto], None], message: str) -> None:
        folder = copied(name)
        changed(change)(folder)
        with pytest.raises(UserError, match=message):
            flashmem.compile(folder, tmp_path / "x.flashmem", max_length=96, batch=2, build=False)
        shutil.rmtree(folder)

    def one_text(graph: onnx.GraphProto) -> None:
        graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1

    def joined_rows(graph: onnx.GraphProto) -> None:
        graph.initializer.append(helper.make_tensor("one_row", onnx.TensorProto.INT64, [3], [1, -1, 32]))
        made = next(node for node in graph.node if "logits" in node.output)
        graph.node.insert(len(graph.node) - 1, helper.make_node("Reshape", [made.input[0], "one_row"], ["joined"]))
        made.input[0] = "joined"

    def positions_without_rows(graph: onnx.GraphProto) -> None:
        unsqueeze = next(node for node in graph.node if node.op_type == "Unsqueeze" and "Range_output" in node.input[0])
        graph.initializer.append(helper.make_tensor("a_row", onnx.TensorProto.INT64, [2], [1, -1]))
        unsqueeze.op_type, unsqueeze.input[1] = "Reshape", "a_row"

    refused("llama", one_text, r"was exported for a batch of 1; export it with an open batch")
    refused("llama", joined_rows, r"cannot answer 2 requests at a time: its logits have the shape \[1, 1, 391\]; leave out")
    refused(
        "gemma", positions_without_rows, r"computes positions from past_key_values\.0\.key .*export it with the input position"
    )


@pytest.mark.thorough
def test_names_of_another_builder(copied: Callable[[str], Path], folders: Path) -> None:
    """`genai_config.json` says what inputs and outputs are called."""
    folder = copied("genai")
    settings = json.loads((folder / "genai_config.json").read_text())
    decoder = settings["model"]["decoder"]
    decoder["inputs"] |= {"input_ids": "tokens", "past_key_names": "k_in_%d"}
    decoder["outputs"] |= {"present_key_names": "k_out_%d", "logits": "scores"}
    (folder / "genai_config.json").write_text(json.dumps(settings))
    names = {"input_ids": "tokens", "logits": "scores"}
    names |= {
        f"{old}.{layer}.key": f"{new}_{layer}"
        for layer in (0, 1)
        for old, new in (("past_key_values", "k_in"), ("present", "k_out"))
    }
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    onnx.save(model, folder / "model.onnx")
    check(generated(folder), folders / "genai")


@pytest.mark.thorough
def test_with_quantised_weights(copied: Callable[[str], Path]) -> None:
    """Weights of a folder can be quantised too: 8 bits change few of the tokens of a small model."""
    folder = copied("llama")
    tokens = generated(folder, quantize="int8")
    expected = [token for token, _ in reference(folder, PROMPT, 40)]
    assert tokens[:3] == expected[:3]
    assert flashmem.Bundle.open(folder.with_suffix(".flashmem")).meta["quantised"]


@pytest.mark.thorough
def test_the_cache_notices_a_new_tokenizer(
    copied: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHMEM_CACHE", str(tmp_path / "cache"))
    folder = copied("llama")
    first = flashmem.compile(folder, max_length=64, build=False)
    assert flashmem.compile(folder, max_length=64, build=False).path == first.path
    began = first.language().begin  # type: ignore[union-attr]
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "add_bos_token": True}))
    again = flashmem.compile(folder, max_length=64, build=False).language()
    assert began is None
    assert again is not None and again.tokens[again.begin or 0] == "<|im_start|>"


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def changed(change: Callable[[onnx.GraphProto], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        model = onnx.load(folder / "model.onnx")
        change(model.graph)
        onnx.save(model, folder / "model.onnx")

    return apply


def _another_input(graph: onnx.GraphProto) -> None:
    graph.input.append(helper.make_tensor_value_info("pixel_values", onnx.TensorProto.FLOAT, [1, 3, 8, 8]))


def _no_positions(graph: onnx.GraphProto) -> None:
    """Positions counted from the shape of the cache: a Range, behind a node in which it is not recognised."""
    graph.input.remove(next(value for value in graph.input if value.name == "position_ids"))
    shape = helper.make_node("Shape", ["past_key_values.0.key"], ["its_shape"])
    graph.node.insert(0, shape)
    graph.node.insert(1, helper.make_node("Gather", ["its_shape", "two"], ["earlier"], axis=0))
    graph.node.insert(2, helper.make_node("Add", ["earlier", "zeros"], ["position_ids"]))
    graph.initializer.append(helper.make_tensor("two", onnx.TensorProto.INT64, [], [2]))
    graph.initializer.append(helper.make_tensor("zeros", onnx.TensorProto.INT64, [1, 1], [0]))


def _other_cache(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if "present.0.key" in node.output:
            node.input[:] = node.input[::-1]


BAD: dict[str, tuple[str, Callable[[Path], None], type[UserError], str]] = {
    "no tokenizer": ("llama", without("tokenizer.json"), MissingFileError, r"has no tokenizer\.json; save"),
    "no decoder": (
        "llama",
        lambda folder: (folder / "model.onnx").rename(folder / "model_q4.onnx"),
        MissingFileError,
        r"has no model\.onnx; of model_q4\.onnx, copy or rename one to it$",
    ),
    "a window": ("mistral", lambda folder: None, UserError, r"mask that is not causal with 93 earlier tokens"),
    "an input": ("llama", changed(_another_input), UserError, r"has the input 'pixel_values', which decoders of a text do not"),
    "positions": ("llama", changed(_no_positions), UserError, r"computes positions from past_key_values\.0\.key"),
    "a cache": ("llama", changed(_other_cache), UserError, r"present\.0\.key is made by Concat, not by a Concat of past"),
    "no cache": ("llama", changed(lambda graph: graph.output.pop()), UserError, r"is no decoder with a cache: it needs"),
    "unreadable": (
        "llama",
        lambda folder: (folder / "tokenizer.json").write_text("{"),
        UserError,
        r"is damaged, or of an unknown",
    ),
    "a unigram": (
        "llama",
        lambda folder: (folder / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}'),
        UserError,
        r"tokenizer of the kind 'Unigram', which is not supported",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refusals(case: str, copied: Callable[[str], Path]) -> None:
    name, change, kind, message = BAD[case]
    folder = copied(name)
    change(folder)
    with pytest.raises(kind, match=message):
        flashmem.compile(folder, folder.with_suffix(".flashmem"), max_length=96, build=False)


def test_a_decoder_outside_the_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "private.onnx").write_bytes(b"")
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 256}))
    for name in ("../private.onnx", str(tmp_path / "private.onnx"), "onnx/../../private.onnx"):
        (folder / "genai_config.json").write_text(json.dumps({"model": {"decoder": {"filename": name}}}))
        with pytest.raises(UserError, match=rf"genai_config\.json names the decoder '{name}', outside the model's folder"):
            read_folder(folder, 64)
    (folder / "onnx" / "decoder.onnx").symlink_to(tmp_path / "private.onnx")  # as in caches of downloads
    (folder / "genai_config.json").write_text(json.dumps({"model": {"decoder": {"filename": "onnx/decoder.onnx"}}}))
    with pytest.raises(UserError, match="does not say num_attention_heads"):  # the decoder is found
        read_folder(folder, 64)


def test_a_length_beyond_the_context(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^max_length 300 is not between 32 and 256, the context of "):
        flashmem.compile(folders / "llama", tmp_path / "x.flashmem", max_length=300)
    with pytest.raises(UserError, match=r"^max_length 250 is not between 32 and 248, .* less 8 places that a batch needs$"):
        flashmem.compile(folders / "llama", tmp_path / "x.flashmem", max_length=250, batch=2)


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="is a folder without a language model; name"):
        flashmem.compile(tmp_path, tmp_path / "x.flashmem")


def test_the_command_line(folders: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    run = command_line(monkeypatch, capfd)
    outcome = run("generate", folders / "genai", "Hello", "--max-length", "64", "--max-new-tokens", "4")
    assert outcome.code == 0 and outcome.out.strip()
    assert "4 generated" in outcome.err
