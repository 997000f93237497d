"""Pickling and copying of errors, reports and plans: all their fields survive."""

from __future__ import annotations

import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashmem
from flashmem import Bundle, RunReport, Session
from flashmem.base.errors import BudgetError, MissingFileError, UnsupportedModelError
from flashmem.cli.commands.plan_zoo import ZooPlan
from flashmem.planning.opg.srpt import SrptPlan
from flashmem.profiler.phone_compilers.gpus import GPUS
from flashmem.profiler.phone_compilers.models import ModelReport
from flashmem.profiler.phone_compilers.report import CompilerReport
from flashmem.runtime.engine.failures import RequestError
from flashmem.runtime.engine.report import HostMemoryUse
from flashmem.runtime.generation.generated_text import GenerationReport
from flashmem.schedule.plan import OverlapPlan, PlanViolation
from tests.support.mini_bundle import write_mini_bundle
from tests.support.refused_budget import refused

UNIMPORTED = {"flashmem.__main__"}
"""Modules with side effects at import."""

NEEDED = {"matplotlib", "onnxruntime"}
"""Packages that only some modules need."""

Example = Callable[[Bundle, RunReport], Any]

EXAMPLES: dict[type, Example] = {
    BudgetError: lambda *_: BudgetError("too small", smallest_bytes=7, binding="layer 3", without_patches=9),
    UnsupportedModelError: lambda *_: UnsupportedModelError("no kernel", (("a", "why"), ("b", "why not"))),
    MissingFileError: lambda *_: MissingFileError("there is no m.onnx"),
    PlanViolation: lambda *_: PlanViolation("C2", "3 chunks in flight"),
    RequestError: lambda *_: RequestError(ValueError("index 8")),
    RunReport: lambda _, report: report,
    GenerationReport: lambda *_: GenerationReport(37, 12, 8, 0.5, 0.02, 1 << 20, 14, 9, 1 << 26, True),
    OverlapPlan: lambda bundle, _: bundle.plan,
    SrptPlan: lambda *_: SrptPlan({"w": ((1, 2),)}, feasible=True),
    CompilerReport: lambda *_: CompilerReport(GPUS["adreno750"], "26.1", (), {"matmul": "no such type"}),
    ModelReport: lambda *_: ModelReport("adreno750", "26.1", (), {}, {"matmul": "no such type"}),
    ZooPlan: lambda bundle, _: ZooPlan("mini", bundle.descriptor, "map", bundle.program, bundle.plan, None, {"total": 1.0}),
}
"""Arguments of the errors that are not created from one sentence."""


def public() -> list[type]:
    """All errors, warnings, reports and plans of the package."""
    found: list[type] = []
    for module in pkgutil.walk_packages(flashmem.__path__, "flashmem."):
        if module.name in UNIMPORTED:
            continue
        try:
            members = vars(importlib.import_module(module.name))
        except ModuleNotFoundError as error:
            assert (error.name or "").partition(".")[0] in NEEDED, error
            continue
        for name, member in members.items():
            if not inspect.isclass(member) or member.__module__ != module.name or name.startswith("_"):
                continue
            if issubclass(member, BaseException) or name.endswith(("Report", "Plan")):
                found.append(member)
    return found


PUBLIC = public()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, RunReport]:
    model = write_mini_bundle(tmp_path_factory.mktemp("pickled") / "m.flashmem")
    with Session(model.path, trace=True) as session:
        session.run(None, model.inputs())
        assert session.last_run is not None and session.last_run.loads and session.last_run.layers
        report = session.last_run
        host = HostMemoryUse(1 << 20, 1 << 21, {"weights": 1 << 19, "staging": 1 << 19})  # as with a host budget
        return model.open(), replace(report, memory=replace(report.memory, host=host))


def example(kind: type, made: tuple[Bundle, RunReport]) -> Any:
    if kind in EXAMPLES:
        return EXAMPLES[kind](*made)
    assert issubclass(kind, BaseException), f"{kind.__name__} needs an example here"
    return kind("what is wrong")


def test_all_of_them_are_known() -> None:
    names = {kind.__name__ for kind in PUBLIC}
    assert {"BudgetError", "UserError", "RunError", "FlashmemWarning", "RunReport", "OverlapPlan", "PlanViolation"} <= names
    assert EXAMPLES.keys() <= {*PUBLIC}


@pytest.mark.parametrize("way", ["pickle", "oldest pickle", "copy", "deep copy"])
@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_each_survives_pickle_and_copy(kind: type, way: str, made: tuple[Bundle, RunReport]) -> None:
    value = example(kind, made)
    if isinstance(value, BaseException):
        value.add_note("and what else")
    ways: dict[str, Callable[[Any], Any]] = {
        "pickle": lambda value: pickle.loads(pickle.dumps(value)),
        "oldest pickle": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
        "copy": copy.copy,
        "deep copy": copy.deepcopy,
    }
    again = ways[way](value)
    assert type(again) is kind and again is not value
    if isinstance(value, BaseException):
        assert str(again) == str(value) and again.args == value.args
        assert {name: str(each) for name, each in vars(again).items()} == {
            name: str(each) for name, each in vars(value).items()
        }
    else:
        assert again == value


def test_errors_are_what_their_words_are() -> None:
    """As before they could be pickled."""
    assert str(PlanViolation("C2", "3 chunks in flight")) == "C2: 3 chunks in flight"
    assert repr(BudgetError("too small", smallest_bytes=7, binding="layer 3")) == "BudgetError('too small')"


def test_a_budget_that_a_worker_refuses_reaches_who_asked(tmp_path: Path) -> None:
    """It broke a ProcessPoolExecutor, and `multiprocessing.Pool.get` never returned."""
    model = write_mini_bundle(tmp_path / "m.flashmem")
    with pytest.raises(BudgetError) as here:
        refused(str(model.path))
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawning) as pool:
        error = pool.submit(refused, str(model.path)).exception(30)
    assert isinstance(error, BudgetError) and str(error) == str(here.value)
    assert error.smallest_bytes == here.value.smallest_bytes and error.binding == here.value.binding
    assert np.isfinite(error.without_patches)
