"""What each command makes of its words: the request that reaches the work, refusals, and the text of its help."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from flashmem.base.units import parse_size
from flashmem.bundle.shape_variants import read_variants
from flashmem.request.description import OptionSet
from flashmem.request.request import BundleRequest
from tests.support.command_line import Command, command_line

pytestmark = pytest.mark.build_apart  # others replace functions that are replaced here

CASES = json.loads(Path(__file__).with_name("requests.json").read_text())
"""The words of calls and what they ask for: options of a bundle that are given, and all others that are not empty."""

HELP = json.loads(Path(__file__).with_name("help.json").read_text())
"""The options of each command and their texts."""

WORK: dict[str, tuple[str, ...]] = {
    "commands.bundles": ("check_bundle", "replan_bundle", "list_cache", "clear_cache"),
    "commands.compiling": ("compile_here",),
    "commands.design": ("design_application",),
    "commands.devices": ("measure_devices", "show_devices"),
    "commands.doctor": ("examine",),
    "commands.estimate": ("show_estimate",),
    "commands.generate": ("generate_text",),
    "commands.plan": ("show_plan",),
    "commands.profile": ("measure_device", "profile_device", "report_on", "retrain_model", "write_kit"),
    "commands.queue": ("play_queue",),
    "commands.run": ("run_model",),
    "commands.serve": ("serve_model",),
    "commands.simulate": ("simulate_model",),
    "commands.sweep": ("sweep",),
    "commands.tune": ("tune_device",),
    "commands.verify": ("verify_bundle",),
    "commands.zoo": ("list_models", "export_model"),
    "demo.chat": ("run_demo",),
    "demo.run": ("run_demo",),
}
"""The functions that do the work of the commands, by their modules in `flashmem.cli`."""

SIZES = ("budget", "host_budget", "m_peak", "chunk", "process_memory")
NAMES = {"shape": "shapes", "as_json": "json", "path": "bundle", "verify_weights": "check_weights"}
READERS: dict[str, Callable[[Any], Any]] = {
    **{name: lambda text: text if isinstance(text, str) and "," in text else parse_size(text) for name in SIZES},
    "shape": read_variants,
}


def _values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The options in an argument of a function, by their names, without empty ones."""
    if is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _values(each.name, getattr(value, each.name))
    elif isinstance(value, OptionSet):
        for option in value.options:
            if option in value.given or not isinstance(value, BundleRequest) or option not in BundleRequest.options:
                yield from _values(option, getattr(value, option))
    elif value not in (None, (), "", {}) and (value != "auto" or name == "states"):
        read = READERS.get(name, lambda given: given)
        yield NAMES.get(name, name), read(value)


@dataclass
class Work:
    """What the work of commands was called with: in plain values, and the options of a bundle as they are."""

    calls: list[dict[str, Any]]
    requests: list[BundleRequest]

    def record(self, name: str, arguments: dict[str, Any]) -> None:
        flat = dict(pair for name, value in arguments.items() for pair in _values(name, value))
        self.calls.append({"work": name, **json.loads(json.dumps(flat, default=str))})
        self.requests += [value for value in arguments.values() if isinstance(value, BundleRequest)]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    recorded = Work([], [])

    def replace(module: Any, name: str) -> None:
        code = getattr(module, name).__code__
        names = code.co_varnames[: code.co_argcount]

        def instead(*given: Any, **named: Any) -> None:
            recorded.record(name, {**dict(zip(names, given, strict=False)), **named})
            raise SystemExit(0)

        monkeypatch.setattr(module, name, instead)

    for module, names in WORK.items():
        for name in names:
            replace(importlib.import_module(f"flashmem.cli.{module}"), name)
    return recorded


@pytest.fixture
def flashmem(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


def test_words_become_a_request(flashmem: Command, work: Work) -> None:
    for case in CASES["asked"]:
        work.calls.clear()
        assert flashmem(*case["words"]).code == 0, case
        (made,), (wanted,) = work.calls, case["calls"]
        assert {name: value for name, value in made.items() if value is not False or name in wanted} == wanted, case


def test_words_that_are_refused(flashmem: Command, work: Work) -> None:
    for words in CASES["refused"]:
        outcome = flashmem(*words)
        assert (outcome.code, outcome.out, work.calls) == (2, "", []), words
        assert len(outcome.err.strip().splitlines()[-1]) > 20, words


def test_help_has_every_option(flashmem: Command) -> None:
    for command, options in HELP.items():
        printed = "".join(flashmem(*command.split(), "--help").out.split())
        missing = [flag for flag, text in options.items() if not (flag in printed and "".join(text.split()) in printed)]
        assert not missing, command


def test_a_request_travels_to_a_child_process(flashmem: Command, work: Work) -> None:
    own = ("work", "json", "show_all")
    for case in CASES["asked"]:
        if case["words"][0] == "plan":
            flashmem(*case["words"])
            assert flashmem("compile", case["calls"][0]["model"], *work.requests[-1].arguments()).code == 0, case
            sent, received = work.calls[-2:]
            assert all(received[name] == value for name, value in sent.items() if name not in own), case
    assert len(work.calls) > 10
