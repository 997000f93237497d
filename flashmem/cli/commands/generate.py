"""`flashmem generate`: text by a language model, as it is generated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from flashmem.base.errors import UserError
from flashmem.base.interrupts import asking_first
from flashmem.base.streams import say
from flashmem.base.units import format_size, parse_size
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import is_bundle
from flashmem.cli.commands.compiling import RUN_TIME, CompileOptions, open_bundle, within_process
from flashmem.cli.output.console import emit_json
from flashmem.runtime.generation.conversation import Message
from flashmem.runtime.generation.dialogue import Dialogue
from flashmem.runtime.generation.draft_model import needed_bytes
from flashmem.runtime.generation.generated_text import GenerationReport
from flashmem.runtime.generation.generator import Generator
from flashmem.runtime.generation.options import TextOptions
from flashmem.runtime.opencl.discovery import use_one_device
from flashmem.runtime.request.options import read_host_budget


@dataclass(frozen=True)
class GenerateOptions:
    """The options of `flashmem generate`. `plain`: continue the prompt as a text, without the model's chat template. `chat`:
    after the prompt, answer each line of stdin in the same conversation.

    `conversation`: a file with which a conversation goes on, and to which it is saved after each answer. `draft`: a small model
    that drafts answers.
    """

    plain: bool = False
    system: str | None = None
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    json: bool = False
    conversation: Path | None = None
    speculate: bool = True
    host_budget: str | None = None
    draft: Path | None = None
    process_memory: str | None = None
    chat: bool = False


def generate_text(model: Path, prompt: str | None, compiling: CompileOptions, options: GenerateOptions) -> None:
    """Answer `prompt`, or each line of stdin in one conversation, or both, with a bundle or a GGUF file.

    Raises:
        UserError: a file or an option is invalid.
        RunError: a run failed.
    """
    if options.system is not None and options.plain:
        raise UserError("--system is a message of a conversation; leave out either --system or --plain")
    if options.conversation is not None and options.plain:
        raise UserError("--conversation keeps messages, which --plain does not have; leave out one of them")
    if options.chat and options.plain:
        raise UserError("--chat is a conversation, and --plain continues a text; leave out one of them")
    if options.plain and prompt is None:
        raise UserError("--plain continues a text; give one after the model")
    if options.draft is not None and not options.speculate:
        raise UserError("--draft makes drafts, and --no-speculate checks none; leave out one of them")
    with open_generator(model, compiling, options.draft, options.host_budget, options.process_memory) as generator:
        saved = options.conversation
        asked = prompt is not None and not options.chat and saved is None
        if prompt is not None and (options.plain or (asked and not generator.language.chats)):
            _answer(generator, generator.generate(prompt, speculate=options.speculate, **_text_options(options)), options)
            return
        messages: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
        if saved is not None and saved.exists():
            messages = generator.restore(saved) or messages
        _converse(generator, messages, options, prompt)


def _converse(generator: Generator, messages: list[Message], options: GenerateOptions, prompt: str | None) -> None:
    """Answer the prompt and, in a chat, each line of stdin: it goes on after an answer that Ctrl-C ended, and after an error
    that only one message has.
    """
    dialogue, is_chat = Dialogue(generator, messages), options.chat or prompt is None
    given = [] if prompt is None else [prompt]
    for line in chain(given, _lines() if is_chat else ()):
        answer = dialogue.ask(line, speculate=options.speculate, **_text_options(options))
        try:
            if is_chat:
                with asking_first() as is_ended:
                    _answer(generator, answer, options, is_ended)
            else:
                _answer(generator, answer, options)
        except UserError as error:
            if not is_chat:
                raise
            say(str(error))
            continue
        if dialogue.forgotten:
            say(f"the cache is full: the oldest {dialogue.forgotten} messages are forgotten")
        if options.conversation is not None:
            _save(generator, options.conversation, dialogue.messages)


def open_generator(
    model: Path,
    compiling: CompileOptions,
    draft: Path | None = None,
    host_budget: str | None = None,
    process_memory: str | None = None,
) -> Generator:
    """A generator of a bundle, or of a GGUF file or a folder, which is compiled first; with the small model `draft`.

    The budget of `compiling` is for both. Raises as `generate_text`.
    """
    use_one_device()
    if compiling.batch not in (None, 1):
        drafts = ", and a batch makes no drafts" if draft is not None else ""
        raise UserError(f"--batch is for flashmem compile and flashmem serve{drafts}; leave it out")
    if draft is None:
        bundle, options = open_language_model(model, compiling, host_budget, process_memory)
        return Generator(bundle, **options)
    if process_memory is not None:
        raise UserError("--process-memory is for one model; leave --draft out, or give --budget")
    read_host_budget(host_budget)
    own = CompileOptions(device=compiling.device, max_length=compiling.max_length)
    small = open_bundle(draft, own, still_open=RUN_TIME, build=True) if not is_bundle(draft) else Bundle.open(draft)
    budget = compiling.budget
    if budget is not None:
        left = parse_size(budget, what="budget") - needed_bytes(small, compiling.device or "auto")
        if left <= 0:
            raise UserError(f"--budget {budget} is less than --draft needs alone; raise it, or leave --draft out")
        compiling = replace(compiling, budget=str(left))
    bundle, options = open_language_model(model, compiling, host_budget, None)
    return Generator(bundle, **{**options, "budget": budget}, draft=small)


def open_language_model(
    model: Path, compiling: CompileOptions, host_budget: str | None, process_memory: str | None
) -> tuple[Bundle, dict[str, Any]]:
    """The bundle of a language model, which is compiled first if `model` is none; and keyword arguments for its generator.

    Raises as `generate_text`.
    """
    use_one_device()
    read_host_budget(host_budget)
    compiling, process = within_process(compiling, process_memory, host_budget, compiles=not is_bundle(model))
    bundle = open_bundle(model, compiling, still_open=RUN_TIME, build=True, process=process)
    in_bundle = process_memory is not None or not is_bundle(model)  # a model compiled now has its budget in the bundle
    return bundle, {
        "device": compiling.device or "auto",
        "budget": None if in_bundle else compiling.budget,
        "host_budget": host_budget,
        "process_memory": process_memory,
        "mode": compiling.mode or "auto",
    }


def _save(generator: Generator, path: Path, messages: list[Message]) -> None:
    try:
        generator.save(path, messages)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; name another file for --conversation") from error


def _lines() -> Iterator[str]:
    """Lines of stdin without empty ones; a terminal shows where to write."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _text_options(options: GenerateOptions) -> TextOptions:
    """The keywords of `Generator.generate`."""
    return {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "repetition_penalty": options.repetition_penalty,
        "seed": options.seed,
        "stop": options.stop,
    }


def _answer(
    generator: Generator,
    answer: Any,
    options: GenerateOptions,
    is_ended: Callable[[], bool] = lambda: False,
) -> None:
    """Print an answer (a generator of its pieces) as it comes, until it `is_ended`, and what it took."""
    pieces: list[str] = []
    try:
        for piece in answer:
            pieces.append(piece)
            if not options.json:
                print(piece, end="", flush=True)
            if is_ended():
                break
    finally:  # Ctrl-C ends with what was said so far
        answer.close()
        if pieces and not options.json:
            print(flush=True)
    text, report = "".join(pieces), generator.last
    assert report is not None
    if options.json:
        emit_json({"text": text, **asdict(report)})
    else:
        say(_summary(report))
    if not (report.ended or is_ended()) and report.tokens < options.max_new_tokens:
        say(f"the cache of {generator.language.max_length} tokens is full, so the answer ends here")


def _summary(report: GenerationReport) -> str:
    """One line about a generation."""
    read = f"{report.prompt - report.reused} tokens read, {report.tokens} generated"
    first = f"the first after {report.first_seconds:.2f} s"
    rate = f", then {1 / report.token_seconds:.1f} a second" if report.token_seconds else ""
    drafts = f", {report.accepted} of {report.drafted} drafted tokens right" if report.drafted else ""
    loaded = f", {format_size(report.token_bytes)} of weights loaded for each" if report.token_bytes else ""
    return f"{read}: {first}{rate}{drafts}{loaded}; {format_size(report.peak_bytes)} of memory at most"
