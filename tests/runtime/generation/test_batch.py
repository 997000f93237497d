"""Several requests at a time: each has the tokens that it has alone, whoever joins or leaves; one load of weights for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

import flashmem
from flashmem.base.errors import BudgetError, RunError, UserError
from flashmem.bundle.language import BATCH_TOKENS
from flashmem.runtime.generation.generated_text import Piece
from flashmem.runtime.generation.scheduler import Scheduler
from flashmem.runtime.session import Session
from tests.runtime.generation.test_generator import MARGIN, MODELS, prompt
from tests.support.command_line import Command, command_line
from tests.support.compared import DEVICES
from tests.support.gguf_models import SmallLlama
from tests.support.refused_threads import refuse_threads

ROWS = 3
PROMPTS = [prompt(count, count) for count in (12, 20, 9, 1, 5, 40, 8, 63)]
"""Of one token, of fewer and of more than a run reads, and one that leaves room for a single token."""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SmallLlama().write(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def bundle(file: Path) -> flashmem.Bundle:
    return flashmem.compile(file, file.with_suffix(".flashmem"), max_length=64, batch=ROWS)


@pytest.fixture
def generator(bundle: flashmem.Bundle) -> Iterator[flashmem.BatchGenerator]:
    with flashmem.BatchGenerator(bundle) as made:
        yield made


def alone(generator: flashmem.BatchGenerator, tokens: list[int], **options: Any) -> str:
    """The text of a request that no other is beside."""
    return "".join(generator.generate(tokens, **options))


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
@pytest.mark.parametrize(("name", "kv"), [("blocks", "fp16"), ("one format", "int8"), ("floats", "fp32")])
def test_the_likeliest_tokens(name: str, kv: Any, place: tuple[str, str], tmp_path: Path) -> None:
    """More requests than rows, of different lengths: the texts are those of each alone, and begin as a decoder's in float64."""
    model, (device, path) = MODELS[name], place
    file = model.write(tmp_path / "m.gguf")
    options: Any = {"device": device, "memory_path": path, "max_length": 64, "state_precision": kv, "batch": ROWS}
    with flashmem.BatchGenerator(flashmem.compile(file, tmp_path / "m.flashmem", **options), device=device) as generator:
        assert generator.rows == ROWS
        apart = [alone(generator, each, max_new_tokens=10) for each in PROMPTS]
        begun = [generator.generate(each, max_new_tokens=10) for each in PROMPTS]
        assert ["".join(each) for each in begun] == apart
        compared = 0
        for tokens, text, generation in zip(PROMPTS, apart, begun, strict=True):
            report, room = generation.report, 65 - len(tokens)
            assert report is not None and report.prompt == len(tokens)
            assert report.ended or report.tokens == min(10, room)
            if kv != "int8":
                wanted = generator.tokenizer.decode(model.greedy(tokens, min(10, room), MARGIN)).decode(errors="replace")
                assert text.startswith(wanted.rstrip("\ufffd"))
                compared += len(wanted)
        assert kv == "int8" or compared > 40


def test_requests_join_and_leave_between_tokens(generator: flashmem.BatchGenerator) -> None:
    """Options of their own, a stop text, a client that leaves, and others that come later."""
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 30}, {"max_new_tokens": 12, "temperature": 0.8, "seed": 1},
        {"max_new_tokens": 25, "temperature": 1.7, "seed": 2, "top_p": 0.9},
        {"max_new_tokens": 9, "repetition_penalty": 1.4}, {"max_new_tokens": 20, "temperature": 1.0, "top_k": 5, "seed": 3},
    ]  # fmt: skip
    wanted = [alone(generator, tokens, **options) for tokens, options in zip(PROMPTS, asked, strict=False)]
    stop = wanted[0][4:6]
    leaving = generator.generate(PROMPTS[5], max_new_tokens=24)
    first = generator.generate(PROMPTS[0], **asked[0])
    stopped = generator.generate(PROMPTS[0], stop=stop, **asked[0])
    begun = [next(first)]
    assert next(leaving) is not None
    later = [generator.generate(tokens, **options) for tokens, options in zip(PROMPTS[1:], asked[1:], strict=False)]
    leaving.close()
    assert list(leaving) == [] and leaving.report is None
    assert ["".join(each) for each in later] == wanted[1:]
    assert "".join([*begun, *first]) == wanted[0]
    assert "".join(stopped) == wanted[0][: wanted[0].index(stop)]
    assert stopped.report is not None and stopped.report.ended and not list(stopped)


def test_threads_ask_at_once_and_drop_what_they_began(generator: flashmem.BatchGenerator) -> None:
    wanted = [alone(generator, tokens, max_new_tokens=6) for tokens in PROMPTS]
    found = [""] * len(PROMPTS)

    def ask(number: int) -> None:
        next(generator.generate(PROMPTS[number - 1], max_new_tokens=20))  # and no reference to it
        found[number] = alone(generator, PROMPTS[number], max_new_tokens=6)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == wanted


def test_a_model_of_one_row_answers_in_turn(file: Path, tmp_path: Path) -> None:
    """With the texts of a `Generator`, drafts and what it keeps of an answer; one that leaves makes room for the next."""
    one = flashmem.compile(file, tmp_path / "one.flashmem", max_length=64, build=False)
    given: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 2}, {"speculate": False}]
    asked = [(tokens, each) for tokens in PROMPTS[:4] for each in given]
    with flashmem.Generator(one) as generator:
        wanted = ["".join(generator.generate(tokens, max_new_tokens=9, **each)) for tokens, each in asked]
    with flashmem.BatchGenerator(one) as batch:
        assert batch.rows == 1
        leaving = batch.generate(PROMPTS[4], max_new_tokens=50)
        begun = [batch.generate(tokens, max_new_tokens=9, **each) for tokens, each in asked]
        leaving.close()
        assert ["".join(each) for each in begun] == wanted
        more = batch.generate([*PROMPTS[3], 5, *prompt(9)])
        list(more)
        again = batch.generate([*PROMPTS[3], 5, *prompt(9), 7])
        list(again)
        assert again.report is not None and again.report.reused == len(PROMPTS[3]) + 10


def test_pieces_that_are_delivered(generator: flashmem.BatchGenerator) -> None:
    given: Any = {"max_new_tokens": 6, "temperature": 0.5, "seed": 3}
    got = SimpleQueue[Piece]()
    made = generator.generate(prompt(9), deliver=got.put, **given)
    pieces = [str(each) for each in iter(lambda: got.get(timeout=60), None)]
    assert "".join(pieces) == alone(generator, prompt(9), **given)
    assert made.report is not None and made.report.prompt == 9


def test_cancelled_requests_do_not_wait_for_a_row() -> None:
    """Also while no row is free."""
    model: Any = SimpleNamespace(cached=[[]], reusable=lambda row, tokens: 0)
    scheduler, here, others = Scheduler(model), _text(), [_text() for _ in range(3)]
    for each in (here, *others):
        scheduler.add(each)
    assert scheduler.admit()
    others[0].is_cancelled = others[2].is_cancelled = True
    assert scheduler.admit() and scheduler._rows == [here] and list(scheduler._waiting) == [others[1]]


def _text() -> Any:
    return SimpleNamespace(is_cancelled=False, tokens=[1])


def left_behind(count: int) -> int:
    """How many tokens of a prompt of `count` were read by runs that all prompts with this beginning make."""
    runs = list(range(0, count - BATCH_TOKENS + 1, BATCH_TOKENS)) if count >= BATCH_TOKENS else []
    again = count - BATCH_TOKENS if count % BATCH_TOKENS > 1 else count  # where the last run begins that is no such run
    return max((at + BATCH_TOKENS for at in runs if at + BATCH_TOKENS <= again), default=0)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 15, 16, 17, 23, 24, 33])
def test_a_prompt_that_begins_as_an_earlier_one(bundle: flashmem.Bundle, count: int) -> None:
    """Its runs are those of a prompt that is read whole, without those for tokens that a row still has; so is its text."""
    first, rest = prompt(count, 7), prompt(20, 8)
    asked = [first, first + rest, first[:-1] + rest[:5], rest + first]
    alone_in_new = []
    for tokens in asked:
        with flashmem.BatchGenerator(bundle) as new:
            alone_in_new.append(alone(new, tokens, max_new_tokens=10))
    with flashmem.BatchGenerator(bundle) as generator:
        found, reused = [alone(generator, first, max_new_tokens=10)], []
        for tokens in asked[1:]:
            beside = generator.generate(PROMPTS[4], max_new_tokens=20)
            generation = generator.generate(tokens, max_new_tokens=10)
            found.append("".join(generation))
            list(beside)
            assert generation.report is not None
            reused.append(generation.report.reused)
        again = generator.generate(first + rest, max_new_tokens=10)
        assert ["".join(again), *found] == [alone_in_new[1], *alone_in_new]
    whole, common = left_behind(count), (count - 1) // BATCH_TOKENS * BATCH_TOKENS
    assert reused == [whole, common, 0]


def test_a_cancelled_request_leaves_what_it_read(bundle: flashmem.Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, run = prompt(48, 3), Session.run
    with flashmem.BatchGenerator(bundle) as generator:
        wanted = alone(generator, tokens[:40] + prompt(5, 1), max_new_tokens=6)
    with flashmem.BatchGenerator(bundle) as generator:
        runs = 0

        def counted(session: Session, *given: Any, **options: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == 2:
                leaving.close()
            return run(session, *given, **options)

        monkeypatch.setattr(Session, "run", counted)
        with generator._lock:  # no run before the name is set
            pass
        leaving = generator.generate(tokens)
        assert list(leaving) == []
        later = generator.generate(tokens[:40] + prompt(5, 1), max_new_tokens=6)
        assert "".join(later) == wanted
        assert later.report is not None and later.report.reused == 16


def test_one_load_of_the_weights_serves_all(tmp_path: Path) -> None:
    """Within a small budget a run loads what it loads for one request, and caches count in the budget."""
    file = SmallLlama(formats=("Q8_0",)).write(tmp_path / "m.gguf")
    options: Any = {"device": DEVICES[0][0], "max_length": 64, "batch": ROWS}
    with pytest.raises(BudgetError) as refused:
        flashmem.compile(file, tmp_path / "m.flashmem", budget=10_000, **options)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    made = flashmem.compile(file, tmp_path / "m.flashmem", budget=int(1.1 * smallest), **options)
    assert [state.shape for state in made.program.states] == [(ROWS, 2, 64 + BATCH_TOKENS, 16)] * 4
    assert made.program.states_bytes >= 4 * ROWS * 2 * 72 * 16 * 2
    with flashmem.BatchGenerator(made, device=DEVICES[0][0]) as generator:
        one = generator.generate(PROMPTS[0], max_new_tokens=12)
        texts = {"".join(one)}
        assert one.report is not None and one.report.token_bytes > 0
        together = [generator.generate(PROMPTS[0], max_new_tokens=12) for _ in range(ROWS)]
        texts |= {"".join(each) for each in together}
        assert len(texts) == 1
        for each in together:
            assert each.report is not None and each.report.token_bytes <= 1.3 * one.report.token_bytes
            assert each.report.peak_bytes <= 1.1 * smallest


def test_closing_ends_requests(bundle: flashmem.Bundle) -> None:
    generator = flashmem.BatchGenerator(bundle)
    begun = [generator.generate(tokens, max_new_tokens=60) for tokens in PROMPTS[:2] * 3]
    next(begun[0])
    generator.close()
    with pytest.raises(RunError, match="the generator was closed"):
        list(begun[-1])
    with pytest.raises(RunError, match="the generator is closed; open a new one"):
        generator.generate(PROMPTS[0])


def test_a_failed_run_ends_all_requests(generator: flashmem.BatchGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Session.run

    def late(session: Session, *given: Any, **options: Any) -> Any:
        time.sleep(0.05)  # so that all have joined
        return run(session, *given, **options)

    monkeypatch.setattr(Session, "run", late)
    begun = [generator.generate(tokens, max_new_tokens=40) for tokens in PROMPTS[:ROWS]]
    for each in begun:
        next(each)
    monkeypatch.setattr(Session, "run", lambda *given, **options: (_ for _ in ()).throw(RunError("the device is lost")))
    for each in begun:
        with pytest.raises(RunError, match="the device is lost"):
            list(each)
    monkeypatch.setattr(Session, "run", run)
    assert alone(generator, PROMPTS[0], max_new_tokens=3)


def test_what_is_refused(file: Path, bundle: flashmem.Bundle, generator: flashmem.BatchGenerator, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="and the cache holds 64; shorten the prompt"):
        generator.generate(prompt(65))
    with pytest.raises(UserError, match="max_new_tokens 0 is not possible"):
        generator.generate("a", max_new_tokens=0)
    with pytest.raises(UserError, match="answers 3 requests at a time; open it with flashmem"):
        flashmem.Generator(bundle)
    with pytest.raises(UserError, match="--batch 65 is not possible; give a number from 1 to 64"):
        flashmem.compile(file, tmp_path / "m.flashmem", batch=65)
    one = flashmem.compile(file, tmp_path / "one.flashmem", max_length=64, build=False)
    with pytest.raises(UserError, match="a batch makes no drafts; leave the draft model out, or compile the model without"):
        flashmem.BatchGenerator(bundle, draft=one)


def test_the_command_line(command: Command, file: Path) -> None:
    for words, said in (
        (("generate", file, "a", "--batch", "3"), "--batch is for flashmem compile and flashmem serve; leave it out"),
        (("generate", file, "--estimate", "--batch", "3"), "an estimate is of one request at a time; leave out --batch"),
        (
            ("compile", Path(__file__).parents[2] / "data" / "gptneo-tiny.onnx", "--batch", "3"),
            "--batch is for a GGUF file or a folder of a language model",
        ),
    ):
        refused = command(*words)
        assert refused.code == 2 and said in refused.err and refused.err.count("\n") == 1


def test_a_thread_that_cannot_start_fails_its_request_only(
    generator: flashmem.BatchGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, "flashmem-batch")
    with pytest.raises(RunError, match="the thread flashmem-batch could not be started"):
        generator.generate(PROMPTS[0], max_new_tokens=2)
    assert alone(generator, PROMPTS[0], max_new_tokens=2) and not generator._scheduler._waiting
