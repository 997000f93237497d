"""Folders of safetensors beside transformers' reading of them, and what is said of those that cannot be read."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import flashmem
from flashmem.base.errors import UserError
from flashmem.compilation import read_compilation
from flashmem.compiler.frontend.decoder.graph import write_decoder
from flashmem.compiler.frontend.decoder.kinds import decoder_of
from flashmem.compiler.frontend.decoder.weights import dequantised, matrix, sketched
from flashmem.compiler.frontend.decoder_files import converted
from flashmem.compiler.frontend.gguf.reader import GGUFFile
from flashmem.compiler.frontend.safetensors.reader import SafetensorsFolder
from flashmem.request.request import BundleRequest
from tests.support.compared import PLACES
from tests.support.gguf_models import CONTROLS, TEMPLATE, SmallLlama, vocabulary
from tests.support.safetensors_folders import AT, FOLDERS, SHOWN, TOKENS, write_safetensors

LOGITS = json.loads((Path(__file__).parent / "logits.json").read_text())


CHOICE = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None}


def written(name: str, folder: Path, read: Any = dequantised) -> Path:
    file = SafetensorsFolder(FOLDERS[name].write(folder / "m", shards=2))
    decoder = decoder_of(file)
    file.check_settings()
    write_decoder(folder / "m.onnx", decoder, file, 128, read)
    return folder / "m.onnx"


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """ONNX Runtime runs the decoder, which reads a prompt beyond the windows in two parts."""
    session = onnxruntime.InferenceSession(written(name, tmp_path))
    cache = {each.name: np.zeros(each.shape, np.float32) for each in session.get_inputs() if each.name.startswith("past")}
    for (start, end), wanted in zip(itertools.pairwise((0, *AT)), LOGITS[name], strict=True):
        given = {"input_ids": np.array([TOKENS[start:end]]), "total_sequence_length": np.array(end, np.int32)}
        logits, *present = session.run(None, {**given, **cache})
        cache = dict(zip(cache, present, strict=True))
        assert np.abs(logits[0, -1, :SHOWN] - wanted).max() < 5e-5 * np.ptp(wanted)


@pytest.mark.parametrize(("name", "place"), list(zip(FOLDERS, itertools.cycle(PLACES), strict=False)), ids=str)
def test_logits_on_a_device(name: str, place: tuple[str, str], tmp_path: Path) -> None:
    shapes = [{"input_ids": (1, count)} for count in (8, 92)]
    given: Any = {"device": place[0], "memory_path": place[1], "shapes": shapes, "states": "auto"}
    made = flashmem.compile(written(name, tmp_path, matrix), tmp_path / "m.flashmem", **given)
    with flashmem.Session(made, device=place[0]) as session:
        for (start, end), wanted in zip(itertools.pairwise((0, *AT)), LOGITS[name], strict=True):
            ids = np.array([TOKENS[start:end]])
            [found] = session.run(None, {"input_ids": ids, "total_sequence_length": np.array(end, np.int32)})
            assert np.abs(found[0, -1, :SHOWN] - wanted).max() < 5e-5 * np.ptp(wanted)


def with_tokenizer(folder: Path) -> Path:
    """Write the tokenizer of `SmallLlama` as transformers does, and a way to choose tokens."""
    tokens, merges = vocabulary()
    added = [{"id": tokens.index(each), "content": each, "special": True} for each in CONTROLS]
    steps = [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]
    model = {"type": "BPE", "vocab": {token: at for at, token in enumerate(tokens)}, "merges": [list(each) for each in merges]}
    content = {"model": model, "added_tokens": added, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE}))
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None})
    )
    return folder


def test_the_language_is_that_of_the_same_model_in_gguf(tmp_path: Path) -> None:
    folder = with_tokenizer(replace(FOLDERS["llama 3"]).write(tmp_path / "m"))
    found, wanted = SafetensorsFolder(folder).language(), GGUFFile(SmallLlama().write(tmp_path / "m.gguf")).language()
    assert found.pop("sampling") == {"temperature": 0.6, "top_k": 20}
    assert {**found, "ends": {*found["ends"]}} == {
        **{name: value for name, value in wanted.items() if name != "sampling"}, "ends": {2, *wanted["ends"]}
    }  # fmt: skip


def test_a_folder_is_compiled(tmp_path: Path) -> None:
    """From two files of weights; each file whose change makes the bundle outdated is known."""
    folder = with_tokenizer(FOLDERS["mistral"].write(tmp_path / "m", shards=2))
    compilation = read_compilation(folder, BundleRequest(device="pocl", max_length=64, batch=2))
    made = flashmem.compile(folder, device="pocl", max_length=64, batch=2, build=False)
    language = made.language()
    assert language is not None and language.max_length == 64 and language.begin is None
    assert compilation.find() is not None
    for name in ("config.json", "tokenizer.json", "generation_config.json", "model-00002-of-00002.safetensors"):
        before = (folder / name).stat()
        (folder / name).touch()
        assert compilation.find() is None
        os.utime(folder / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert compilation.find() is not None


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("llama 3", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "config.json has the key rope_scaling with the value"),
        ("llama 3", {"hidden_act": "gelu"}, "config.json has the key hidden_act with the value 'gelu'"),
        ("llama 3", {"a_key_of_the_future": 1}, "config.json has the key a_key_of_the_future with the value 1"),
        ("llama 3", {"quantization_config": {"bits": 4}}, "config.json has the key quantization_config with the"),
        ("llama 3", {"model_type": "mamba"}, "config.json has the model_type 'mamba', which is not supported"),
        ("llama 3", {"model_type": "mixtral", "num_local_experts": 8}, "config.json is of a mixture of experts"),
        ("qwen2", {"use_sliding_window": True}, "config.json has the key use_sliding_window with the value True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "config.json has the key layer_types with"),
        ("gemma2", {"text_config": {}}, " is a model of more than text"),
    ],
)  # fmt: skip
def test_settings_with_an_effect_are_refused(name: str, given: dict[str, Any], said: str, tmp_path: Path) -> None:
    small = FOLDERS[name]
    folder = with_tokenizer(replace(small, given={**small.given, **given}).write(tmp_path / "m"))
    with pytest.raises(UserError) as caught, converted(folder, 64, sketched):
        pass
    assert str(caught.value).startswith(f"{folder}{'' if said.startswith(' ') else '/'}{said}")


def test_damaged_folders(tmp_path: Path) -> None:
    def refused(change: Callable[[Path], Any], said: str, shards: int = 1) -> None:
        folder = with_tokenizer(FOLDERS["qwen3"].write(tmp_path / f"m{len([*tmp_path.iterdir()])}", shards))
        change(folder)
        with pytest.raises(UserError) as caught, converted(folder, 64, sketched):
            pass
        assert str(caught.value).startswith(f"{folder}{said}")

    def rewritten(change: Callable[[bytes], bytes], name: str = "model.safetensors") -> Callable[[Path], Any]:
        return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))

    file, second = "/model.safetensors is damaged (", "model-00002-of-00002.safetensors"
    refused(rewritten(lambda data: data[:-4]), file + "ValueError: the tensor model.norm.weight has bytes ")
    refused(rewritten(lambda data: b"\xff" * 8 + data[8:]), file)
    refused(rewritten(lambda data: data[:40]), file)
    refused(rewritten(lambda data: b""), file)
    refused(lambda folder: (folder / second).unlink(), f"/{second} is missing, which {tmp_path}", 2)
    refused(
        rewritten(lambda data: data.replace(second.encode(), b"../" + second.encode()), "model.safetensors.index.json"),
        f"/model.safetensors.index.json names the file '../{second}', outside the model's folder", 2,
    )  # fmt: skip
    refused(rewritten(lambda data: data.replace(b"true", b"false"), "config.json"), " lacks the tensor lm_head.weight")
    folder = FOLDERS["qwen3"].write(tmp_path / "cut")
    rewritten(lambda data: data[:30], "config.json")(folder)
    with pytest.raises(UserError, match=f"^a file in {folder} is damaged"), converted(folder, 64, sketched):
        pass


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("model.a.weight", "F32", " has the tensor model.a.weight, which has no part in a model of the kind qwen3"),
        ("lm_head.weight", "I8", "the tensor lm_head.weight has the format I8, which is not supported"),
    ],
)
def test_tensors_of_no_use(name: str, dtype: str, said: str, tmp_path: Path) -> None:
    small = FOLDERS["qwen3"]
    folder = with_tokenizer(replace(small, given={**small.given, "tie_word_embeddings": False}).write(tmp_path / "m"))
    tensors = {each: array for each, array in small.tensors().items() if each != "lm_head.weight"}
    write_safetensors(folder / "first.safetensors", tensors, small.dtype)
    more = {name: np.zeros((300, 64), np.int8 if dtype == "I8" else np.float32)}
    more |= {} if dtype == "I8" else {"lm_head.weight": np.zeros((300, 64), np.float32)}
    write_safetensors(folder / "more.safetensors", more, dtype)
    (folder / "model.safetensors").unlink()
    places = {"a": "first.safetensors", name: "more.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UserError) as caught, converted(folder, 64, sketched):
        pass
    assert str(caught.value).startswith(f"{folder}{said}" if said.startswith(" ") else said)
