"""Generation with `--kv int8`, beside a decoder in float64 whose cache is quantised in the same way."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem.base.errors import BudgetError, UserError
from tests.support.command_line import Command, command_line
from tests.support.compared import DEVICES
from tests.support.gguf_models import SmallLlama, plain_head
from tests.support.quantised_rows import Array, dequantised, quantised, scales_of

LENGTH = 160

MODELS = {
    "two layers": SmallLlama(),
    "one key head of 64": SmallLlama(layers=1, hidden=128, heads=2, key_heads=1),
    "floats": plain_head(SmallLlama()),
}

MARGIN = 1e-2
"""Of the logits' range: where the two best are nearer, a code that a rounding error changes by one may decide."""

EXACT = 2e-5
"""Largest error of logits in float32, of their range, over given keys and values."""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


def prompt(count: int, start: int = 0) -> list[int]:
    """Some tokens of the vocabulary, no control tokens."""
    return [3 + (start + 37 * number) % 390 for number in range(count)]


def compiled(model: SmallLlama, folder: Path, **options: Any) -> flashmem.Bundle:
    """The model with a cache in int8."""
    given: Any = {"max_length": LENGTH, "state_precision": "int8", **options}
    return flashmem.compile(model.write(folder / "m.gguf"), folder / "m.flashmem", **given)


def generated(generator: flashmem.Generator, tokens: list[int], count: int, **options: Any) -> list[int]:
    """What is generated after `tokens`, as tokens."""
    for _ in generator.generate(tokens, max_new_tokens=count, **options):
        pass
    return generator._cached[len(tokens) :]


def rounded(name: str, rows: Array) -> Array:
    """Rows of a cache as int8 keeps them."""
    return dequantised(quantised(rows.astype(np.float32)), rows.shape[-1]).astype(np.float64)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_over_the_stored_rows(name: str, place: tuple[str, str], tmp_path: Path) -> None:
    """A prompt of 32 tokens, and single tokens after it. Each stored row is the decoder's, to within a code."""
    model, (device, path) = MODELS[name], place
    bundle = compiled(model, tmp_path, device=device, memory_path=path)
    tokens, found = prompt(44, 5), []
    with flashmem.Session(bundle, device=device) as session:
        for start, stop in ((0, 32), *((at, at + 1) for at in range(32, 44))):
            given = {"input_ids": np.array([tokens[start:stop]]), "total_sequence_length": np.array(stop, np.int32)}
            [logits] = session.run(["logits"], {**given, "temperature": np.array(1, np.float32)})
            found.append(logits[0, -1])
        states = session.states()

    def stored(state: str, rows: Array) -> Array:
        kept = states[state][0, :, : len(rows)].swapaxes(0, 1)
        read = dequantised(kept, model.size).astype(np.float64)
        assert np.all(np.abs(read - rows) <= 0.501 * scales_of(kept))
        assert not states[state][0, :, len(rows) :].any()
        return read

    logits, plain = model.logits(tokens, stored)[31:], model.logits(tokens)[31:]
    close = EXACT * np.ptp(logits)
    np.testing.assert_allclose(np.array(found), logits, rtol=0, atol=close)
    assert np.abs(plain - logits).max() > 10 * close  # a cache of floats would fail
    assert np.abs(plain - logits).max() < 0.05 * np.ptp(logits)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
@pytest.mark.parametrize("name", MODELS)
def test_the_likeliest_tokens(name: str, place: tuple[str, str], tmp_path: Path) -> None:
    """Prompts of one run and of several, read again in part, with drafts."""
    model, (device, path) = MODELS[name], place
    bundle = compiled(model, tmp_path, device=device, memory_path=path)
    compared = 0
    with flashmem.Generator(bundle, device=device) as generator:
        for count in (1, 3, 32, 45, 70, 90):
            wanted = model.greedy(prompt(count, count), 8, MARGIN, rounded)
            assert generated(generator, prompt(count, count), len(wanted) + 1)[: len(wanted)] == wanted
            compared += len(wanted)
    assert compared >= 12


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_a_conversation_is_saved_and_rewound(place: tuple[str, str], tmp_path: Path) -> None:
    """Saved bytes continue with the same bits, and a cache of another type refuses them."""
    device, path = place
    bundle = compiled(SmallLlama(layers=1), tmp_path, device=device, memory_path=path)
    saved, first, second = tmp_path / "chat.npz", prompt(50), prompt(9, 3)
    with flashmem.Generator(bundle, device=device) as generator:
        generated(generator, first, 5)
        generator.save(saved)
        cached = list(generator._cached)
        wanted = generated(generator, [*cached, *second], 8)
    with np.load(saved) as stored:
        kept = {name: array for name, array in stored.items() if name.startswith("past")}
    assert {(array.shape, array.dtype.name) for array in kept.values()} == {((1, 2, len(cached), 20), "int8")}
    with flashmem.Generator(bundle, device=device) as generator:
        generator.restore(saved)
        assert generated(generator, [*cached, *second], 8) == wanted
        assert generator.last is not None and generator.last.reused == len(cached)
        again = generated(generator, [*first[:30], *second], 8)  # rows behind the common tokens are replaced
        assert generator.last.reused == 30
    with flashmem.Generator(bundle, device=device) as generator:
        assert generated(generator, [*first[:30], *second], 8) == again
    half = compiled(SmallLlama(layers=1), tmp_path, device=device, memory_path=path, state_precision="fp16")
    with flashmem.Generator(half, device=device) as generator, pytest.raises(UserError, match="is a conversation with another"):
        generator.restore(saved)


@pytest.mark.thorough
def test_states_need_half_of_the_memory_of_half(tmp_path: Path) -> None:
    """Bytes of states, of the smallest budget, and of the report; launches and other memory are those with fp16."""
    model = SmallLlama(layers=2, hidden=256, heads=4, key_heads=2, formats=("Q8_0",), context=512)
    smallest, bundles = {}, {}
    for kind in ("fp16", "int8"):
        options: Any = {"device": DEVICES[0][0], "state_precision": kind, "max_length": 512}
        with pytest.raises(BudgetError) as refused:
            compiled(model, tmp_path, budget=10_000, **options)
        smallest[kind] = refused.value.smallest_bytes
        (tmp_path / kind).mkdir()
        bundles[kind] = compiled(model, tmp_path / kind, budget=smallest[kind], **options)
    caches = 2 * 2  # keys and values of two layers
    stored = {kind: bundle.program.states_bytes for kind, bundle in bundles.items()}
    assert stored == {"fp16": caches * (2 * 512 * 64 * 2 + 512), "int8": caches * (2 * 512 * 68 + 512)}
    assert smallest["fp16"] - smallest["int8"] == stored["fp16"] - stored["int8"]
    for one, two in zip(bundles["fp16"].variants, bundles["int8"].variants, strict=True):
        families = [Counter(each.shape.family for each in made.program.launches) for made in (one, two)]
        assert families[0] - families[1] == {"rotary_scatter": 2}  # floats are written by the launch that rotates
        assert families[1] - families[0] == {"rotary": 2, "scatter_quantised": 2}
        assert one.program.arena_bytes == two.program.arena_bytes
        for program in (one.program, two.program):
            assert sum(tensor.memory == "states" for tensor in program.tensors) == caches
        read = [sum(each.bytes for each in made.program.launches if each.shape.family == "attention") for made in (one, two)]
        assert read[0] - read[1] == stored["fp16"] - stored["int8"]
    with flashmem.Generator(bundles["int8"], device=DEVICES[0][0]) as generator:
        generated(generator, prompt(40), 5)
        report = generator._model.session.last_run
        assert report is not None and generator.last is not None
        assert report.memory.by_category["states"] == stored["int8"]
        assert generator.last.peak_bytes <= smallest["int8"]


@pytest.mark.thorough
def test_the_command_line(command: Command, tmp_path: Path) -> None:
    file = SmallLlama(layers=1).write(tmp_path / "m.gguf")
    for words in (("--kv", "int8"), ("--state-precision", "int8")):
        said = command("generate", file, "naïve", "--max-length", "64", "--max-new-tokens", "4", *words)
        assert said.code == 0 and said.out, said.err
    refused = command("compile", file, "--kv", "int4")
    assert refused.code == 2 and "Traceback" not in refused.err
