"""`flashmem generate`: text by a language model, as it is generated."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from flashmem.base.errors import UserError
from flashmem.base.interrupts import asking_first
from flashmem.base.streams import say
from flashmem.base.units import format_size
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import is_bundle
from flashmem.cli.calls.models import GenerateCommand
from flashmem.cli.commands.compiling import open_bundle, within_process
from flashmem.cli.output.console import emit_json
from flashmem.request.opening import SessionRequest
from flashmem.request.request import BundleRequest
from flashmem.runtime.generation.conversation import Message
from flashmem.runtime.generation.dialogue import Dialogue
from flashmem.runtime.generation.draft_model import needed_bytes
from flashmem.runtime.generation.generated_text import GenerationReport
from flashmem.runtime.generation.generator import Generator
from flashmem.runtime.generation.options import SamplingOptions, TextOptions
from flashmem.runtime.opencl.discovery import use_one_device


def generate_text(options: GenerateCommand) -> None:
    """Answer the prompt, or each line of stdin in one conversation, or both, with a bundle or a GGUF file.

    Raises:
        UserError: a file or an option is invalid.
        RunError: a run failed.
    """
    _check_options(options)
    prompt = options.prompt
    with open_generator(options) as generator:
        saved = options.conversation
        asked = prompt is not None and not options.chat and saved is None
        if prompt is not None and (options.plain or (asked and not generator.language.chats)):
            _answer(generator, generator.generate(prompt, speculate=options.speculate, **_text_options(options)), options)
            return
        messages: list[Message] = [] if options.system is None else [{"role": "system", "content": options.system}]
        if saved is not None and saved.exists():
            messages = generator.restore(saved) or messages
        _converse(generator, messages, options, prompt)


def _check_options(options: GenerateCommand) -> None:
    """Raise UserError for options that exclude each other."""
    plain = options.plain
    for is_wrong, said in (
        (plain and options.system is not None, "--system is a message of a conversation; leave out either --system or --plain"),
        (
            plain and options.conversation is not None,
            "--conversation keeps messages, which --plain does not have; leave out one of them",
        ),
        (plain and options.chat, "--chat is a conversation, and --plain continues a text; leave out one of them"),
        (plain and options.prompt is None, "--plain continues a text; give one after the model"),
        (
            options.draft is not None and not options.speculate,
            "--draft makes drafts, and --no-speculate checks none; leave out one of them",
        ),
    ):
        if is_wrong:
            raise UserError(said)


def _converse(generator: Generator, messages: list[Message], options: GenerateCommand, prompt: str | None) -> None:
    """Answer the prompt and, in a chat, each line of stdin: it goes on after an answer that Ctrl-C ended, and after an error
    that only one message has.
    """
    dialogue = Dialogue(generator, messages)
    is_chat = options.chat or prompt is None
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


def open_generator(call: GenerateCommand) -> Generator:
    """A generator of a bundle, or of a GGUF file or a folder, which is compiled first; with a small model for drafts.

    The budget is for both. Raises as `generate_text`.
    """
    use_one_device()
    if call.batch != 1:
        drafts = ", and a batch makes no drafts" if call.draft is not None else ""
        raise UserError(f"--batch is for flashmem compile and flashmem serve{drafts}; leave it out")
    if call.draft is None:
        bundle, options = open_language_model(call.model, call)
        return Generator(bundle, **options)
    if call.process_memory is not None:
        raise UserError("--process-memory is for one model; leave --draft out, or give --budget")
    own = BundleRequest(**{name: value for name, value in call.given.items() if name in ("device", "max_length")})
    small = Bundle.open(call.draft) if is_bundle(call.draft) else open_bundle(call.draft, own, build=True)
    large = call
    if call.budget is not None:
        left = call.budget - needed_bytes(small, call.device)
        if left <= 0:
            raise UserError(
                f"--budget {format_size(call.budget)} is less than --draft needs alone; raise it, or leave --draft out"
            )
        large = call.replace(budget=left)
    bundle, options = open_language_model(call.model, large)
    return Generator(bundle, **{**options, "budget": call.budget}, draft=small)


def open_language_model(model: Path, opening: SessionRequest) -> tuple[Bundle, dict[str, Any]]:
    """The bundle of a language model, which is compiled first if `model` is none; and keyword arguments for its generator.

    Raises as `generate_text`.
    """
    use_one_device()
    opening, process = within_process(opening, compiles=not is_bundle(model))
    bundle = open_bundle(model, opening, build=True, process=process)
    options = opening.of_session
    if opening.process_memory is not None or not is_bundle(model):  # a model compiled now has its budget in the bundle
        options.pop("budget", None)
    return bundle, options


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


def _text_options(options: GenerateCommand) -> TextOptions:
    """The keywords of `Generator.generate`. What the model recommends is for those of sampling that are not given."""
    chosen: Any = {name: value for name, value in options.given.items() if name in SamplingOptions.__annotations__}
    made: TextOptions = {"max_new_tokens": options.max_new_tokens, "stop": options.stop}
    made.update(chosen)
    if options.template_argument:
        made["template_arguments"] = dict(map(_template_argument, options.template_argument))
    return made


def _template_argument(given: str) -> tuple[str, Any]:
    """The name and the value of a NAME=VALUE; the value is read as JSON if it is that. Raises UserError."""
    name, equals, value = given.partition("=")
    if not equals or not name.isidentifier():
        raise UserError(f"--template-argument {given!r} is no NAME=VALUE; write one, for instance enable_thinking=false")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _answer(
    generator: Generator,
    answer: Any,
    options: GenerateCommand,
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
    text = "".join(pieces)
    report = generator.last
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
