"""States: outputs that the next run reads as inputs stay on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

import flashmem
from flashmem.base.errors import BudgetError, BundleError, RunError, UserError
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.validation import check_variants
from flashmem.program.tensors import State
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.bundle_changes import rewrite
from tests.support.command_line import Command, command_line
from tests.support.compared import DEVICES
from tests.support.state_models import HIDDEN, MODELS, StateModel, cache, decoder, delays, recurrence
from tests.support.strict_device import PROFILES
from tests.support.strict_device.door import strict

RUNS = 8
LENGTHS = (5, *[1] * 12)


def _saved(model: StateModel, folder: Path) -> Path:
    onnx.save(model.proto, folder / "model.onnx")
    return folder / "model.onnx"


def _bundle(model: StateModel, folder: Path, **options: Any) -> Bundle:
    given: Any = {"states": model.states, **options}
    return flashmem.compile(_saved(model, folder), folder / "m.flashmem", **given)


@pytest.mark.parametrize("place", DEVICES, ids="-".join)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("recurrence", "positive"),
        ("delays", "around 1e6"),
        ("cache", "around 1e3"),
        ("cache read later", "normal"),
        ("cache passed on", "positive"),
    ],
)
def test_runs_continue_where_the_last_one_ended(name: str, kind: str, place: tuple[str, str], tmp_path: Path) -> None:
    model, (device, path) = MODELS[name](kind), place
    wanted, at_the_end = model.through_the_host(lambda inputs: ReferenceEvaluator(model.proto).run(None, inputs), RUNS)
    bundle = _bundle(model, tmp_path, device=device, memory_path=path)
    assert model.states.keys().isdisjoint(port.name for port in bundle.program.inputs)
    with flashmem.Session(bundle, device=device) as session:
        for number in range(RUNS):
            for array, (output, right) in zip(session.run(None, model.inputs(number)), wanted[number].items(), strict=True):
                np.testing.assert_allclose(array, right, rtol=2e-6, atol=1e-6, err_msg=f"{output} of run {number}")
        states = session.states()
        assert states.keys() == model.states.keys()
        for past, array in states.items():
            np.testing.assert_allclose(array, at_the_end[past], rtol=2e-6, atol=1e-6)
        session.set_states(at_the_end)
        assert all(np.array_equal(array, at_the_end[past]) for past, array in session.states().items())
        session.reset()
        first = session.run(None, model.inputs(0))
        np.testing.assert_allclose(first[0], wanted[0][model.outputs()[0]], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
def test_every_mode_leaves_the_same_states(device: Any, tmp_path: Path) -> None:
    model = recurrence()
    bundle = _bundle(model, tmp_path, device=device.descriptor_name, memory_path="buffer", chunk="4KiB")
    found = []
    for mode in descriptor_for(device).modes["buffer"]:
        with flashmem.Session(bundle, device=device.descriptor_name, mode=mode) as session:
            for number in range(4):
                session.run(None, model.inputs(number))
            found.append(session.states()["h"])
    assert len(found) >= 2
    assert all(np.array_equal(found[0], other) for other in found)


@pytest.mark.parametrize(("precision", "of_states"), [("fp32", None), ("fp16", None), ("fp32", "fp16"), ("fp16", "fp32")])
@pytest.mark.parametrize("place", DEVICES, ids="-".join)
def test_a_decoder_reads_words_after_a_prompt(
    place: tuple[str, str], precision: str, of_states: str | None, tmp_path: Path
) -> None:
    """Two shape variants, for the prompt and for each word after it, share the cache; ONNX Runtime gets it as an input."""
    model, (device, path) = decoder(LENGTHS), place
    reference = onnxruntime.InferenceSession(model.proto.SerializeToString())
    wanted, at_the_end = model.through_the_host(lambda inputs: reference.run(None, inputs), len(LENGTHS))
    shapes = [{"x": (1, 5, HIDDEN)}, {"x": (1, 1, HIDDEN)}]
    bundle = _bundle(
        model,
        tmp_path,
        device=device,
        memory_path=path,
        states="auto",
        shapes=shapes,
        precision=precision,
        state_precision=of_states,
    )
    assert {state.name: state.output for state in bundle.program.states} == model.states
    for variant in bundle.variants:
        names = [launch.name for launch in variant.program.launches]
        assert not any("[copy]" in name or ".next" in name for name in names), names  # only new rows are written
    close = 1e-5 if precision == (of_states or precision) == "fp32" else 2e-2
    peaks = []
    with flashmem.Session(bundle, device=device) as session:
        for number in range(len(LENGTHS)):
            [y] = session.run(None, model.inputs(number))
            np.testing.assert_allclose(y, wanted[number]["y"], rtol=0, atol=close)
            assert session.last_run is not None
            peaks.append(session.last_run.memory.peak_bytes)
        for past, array in session.states().items():
            np.testing.assert_allclose(array, at_the_end[past], rtol=0, atol=close)
    assert len(set(peaks[2:])) == 1
    [whole] = {state.shape for state in bundle.program.states}
    itemsize = {"fp32": 4, "fp16": 2}[of_states or precision]
    assert {tensor.nbytes - 128 for tensor in bundle.program.tensors if tensor.memory == "states"} == {
        itemsize * np.prod(whole)
    }


def test_a_window_hides_old_keys_of_a_cache(tmp_path: Path) -> None:
    model = decoder((5, *[1] * 6), window=4)
    reference = onnxruntime.InferenceSession(model.proto.SerializeToString())
    wanted, _ = model.through_the_host(lambda inputs: reference.run(None, inputs), 7)
    bundle = _bundle(model, tmp_path, states="auto", shapes=[{"x": (1, 5, HIDDEN)}, {"x": (1, 1, HIDDEN)}])
    with flashmem.Session(bundle) as session:
        for number, right in enumerate(wanted):
            np.testing.assert_allclose(session.run(None, model.inputs(number))[0], right["y"], rtol=0, atol=1e-5)


def test_a_word_beyond_the_cache_is_refused(tmp_path: Path) -> None:
    model = decoder((5, 1))
    bundle = _bundle(model, tmp_path, states="auto", shapes={"x": (1, 1, HIDDEN)})
    inputs = {**model.inputs(1), "seqlens_k": np.array([24], np.int32), "total_sequence_length": np.array(25, np.int32)}
    with flashmem.Session(bundle) as session:
        with pytest.raises(ValueError, match="index outside the tensor"):
            session.run(None, inputs)
        session.reset()
        session.run(None, {**model.inputs(1), "seqlens_k": np.array([0], np.int32)})


@pytest.mark.parametrize("name", MODELS)
def test_states_break_no_rule_of_a_strict_device(name: str, tmp_path: Path) -> None:
    model = MODELS[name]("normal")
    wanted, _ = model.through_the_host(lambda inputs: ReferenceEvaluator(model.proto).run(None, inputs), 3)
    for profile in PROFILES:
        with strict(profile) as device:
            bundle = _bundle(model, tmp_path, device=list_devices()[0].descriptor_name, build=False)
            with flashmem.Session(bundle) as session:
                for number in range(3):
                    answer = session.run([model.outputs()[0]], model.inputs(number))
                np.testing.assert_allclose(answer[0], wanted[-1][model.outputs()[0]], rtol=1e-5, atol=1e-6)
                session.set_states(session.states())
            assert device.rules.broken == []


def test_states_count_in_the_budget(tmp_path: Path) -> None:
    model = cache()
    with pytest.raises(BudgetError) as refused:
        _bundle(model, tmp_path, budget=1)
    smallest = refused.value.smallest_bytes
    bundle = _bundle(model, tmp_path, budget=smallest)
    assert bundle.program.states_bytes >= 4 * 2 * 3 * 6 * 16
    with flashmem.Session(bundle) as session:
        for number in range(50):
            session.run(None, model.inputs(number))
        assert session.last_run is not None
        memory = session.last_run.memory
    assert memory.peak_bytes <= smallest
    assert memory.by_category["states"] == bundle.program.states_bytes


def test_a_runtime_refuses_states(tmp_path: Path) -> None:
    bundle = _bundle(cache(), tmp_path)
    with flashmem.Runtime(budget="64MB") as runtime, pytest.raises(UserError, match=r"keeps states .* open it in a session"):
        runtime.open(bundle)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({"nothing": "y"}, r"no input 'nothing' for the state nothing=y; it has: cache, new, at$"),
        ({"cache": "nothing"}, r"no output 'nothing' for the state cache=nothing; it has: cache2, y$"),
        ({"cache": "y"}, r"changes its shape from \(2, 3, 6, 16\) to \(2, 3, 16\), and a state has one place"),
        ({"cache": "cache2", "new": "cache2"}, r"'cache2' is given as the next value of two states"),
        ({"at": "y"}, r"changes its shape"),
        ("auto", r"no input and output of the model are named as past and present of a state"),
    ],
)
def test_wrong_pairs_are_refused(states: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        _bundle(cache(), tmp_path, states=states)


def test_variants_with_states_of_other_shapes_are_refused(tmp_path: Path) -> None:
    model = recurrence()
    for value in (*model.proto.graph.input, *model.proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "rows"
    shapes = [{"x": (rows, 48), "h": (rows, 48)} for rows in (2, 3)]
    with pytest.raises(UserError, match=r"'h' has the shapes \([23], 48\) and \([23], 48\) in two of the requested variants"):
        _bundle(model, tmp_path, shapes=shapes)


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with flashmem.Session(_bundle(cache(), tmp_path)) as session:
        before = session.states()["cache"]
        with pytest.raises(ValueError, match="no state 'h'; it has: cache"):
            session.set_states({"h": before})
        with pytest.raises(ValueError, match="has shape"):
            session.set_states({"cache": before[:1]})
        with pytest.raises(ValueError, match="float64"):
            session.set_states({"cache": before.astype(np.float64)})
        with pytest.raises(ValueError, match="no input 'cache'"):
            session.run(None, {**cache().inputs(0), "cache": before})
        assert np.array_equal(session.states()["cache"], before)
    for call in (session.states, session.reset):
        with pytest.raises(RunError, match="the session is closed"):
            call()


def test_a_model_without_states_has_none(tmp_path: Path) -> None:
    with flashmem.Session(_bundle(recurrence(), tmp_path, states=None)) as session:
        assert session.states() == {}
        session.reset()
        assert [port.name for port in session.bundle.program.inputs] == ["x", "h"]


def _overlapping(data: Any) -> None:
    by_name = {tensor["name"]: tensor for tensor in data["tensors"]}
    by_name[data["states"][1]["tensor"]]["offset"] = by_name[data["states"][0]["tensor"]]["offset"]


def _elsewhere(data: Any) -> None:
    for tensor in data["tensors"]:
        tensor["memory"] = "arena"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["states"][0].update(tensor="nowhere"), "state 'a' names the unknown tensor 'nowhere'"),
        (lambda data: data["states"][0].update(shape=[2, 6]), "state 'a' and its tensor differ in shape"),
        (lambda data: data["states"][0].update(dtype="int32"), "state 'a' and its tensor differ in type"),
        (lambda data: data["states"][0].update(name="x"), "two inputs are called 'x'"),
        (lambda data: data["states"][0].update(output="y"), "two outputs are called 'y'"),
        (lambda data: data.update(states_bytes=0), "is outside the states"),
        (lambda data: data["inputs"][0].update(tensor=data["states"][0]["tensor"]), "port 'x' is in the wrong memory"),
        (_elsewhere, "is outside the arena|is in the wrong memory"),
        (_overlapping, "the states 'a' and 'b' share memory"),
    ],
)
def test_damaged_states_are_refused(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    bundle = _bundle(delays(), tmp_path)
    rewrite(bundle.path, "program.json", change)
    with pytest.raises(BundleError, match=message):
        Bundle.open(bundle.path)


def test_variants_with_states_in_other_places_are_refused(tmp_path: Path) -> None:
    program = _bundle(delays(), tmp_path).program
    shorter = replace(program, inputs=tuple(replace(port, shape=(1, 4)) for port in program.inputs))
    check_variants([program, shorter])
    with pytest.raises(BundleError, match="differ in states"):
        check_variants([program, replace(shorter, states=tuple(replace(each, shape=(1, 4)) for each in program.states))])
    moved = tuple(
        replace(tensor, offset=tensor.offset + 512) if tensor.memory == "states" else tensor for tensor in program.tensors
    )
    with pytest.raises(BundleError, match="have their states in other places"):
        check_variants([program, replace(shorter, tensors=moved)])
    assert all(isinstance(state, State) for state in program.states)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return command_line(monkeypatch, capfd)


def test_the_command_line_names_states(command: Command, tmp_path: Path) -> None:
    model = _saved(cache(), tmp_path)
    made = command("compile", model, "-o", tmp_path / "m.flashmem", "--state", "cache=cache2")
    assert made.code == 0, made.err
    ran = command("run", tmp_path / "m.flashmem", "--repeat", "3", "--json", "--verify")
    assert ran.code == 0 and list(ran.json["shapes"]) == ["new", "at"] and ran.json["verify"]["ok"]
    for words, message in (
        (("--state", "cache"), "state 'cache' is not understood; write input=output"),
        (("--state", "auto", "--state", "cache=cache2"), "state 'auto' is not understood"),
        (("--state", "cache=cache2", "--state", "cache=y"), "the state 'cache' is given twice"),
    ):
        refused = command("compile", model, *words)
        assert refused.code == 2 and message in refused.err, refused.err
