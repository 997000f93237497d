"""The environment of a session: folders without write access, forks, reentrant calls, arguments of wrong types."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flashmem import Session
from flashmem.base import paths
from flashmem.base.errors import RunError, UserError
from flashmem.compiler.frontend.mapped_file import load_mapped
from flashmem.runtime.engine.run import Run
from flashmem.runtime.opencl import icd, pocl
from flashmem.runtime.opencl.discovery import list_devices
from tests.support.mini_bundle import MiniModel, write_mini_bundle
from tests.support.paths import DATA

pytestmark = pytest.mark.build_apart

CPUS = [device.descriptor_name for device in list_devices() if device.kind == "cpu"]
CACHES = ("HOME", "XDG_CACHE_HOME", "POCL_CACHE_DIR", "FLASHMEM_CACHE_DIR")
NOWHERE = {"HOME": "/dev/null"}  # no folder can be made under a file, even by root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MiniModel:
    return write_mini_bundle(tmp_path_factory.mktemp("surroundings") / "m.flashmem")


@pytest.fixture
def session(model: MiniModel) -> Iterator[Session]:
    with Session(model.path) as opened:
        yield opened


def flashmem(*words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process whose caches are the folders in `variables` only."""
    environment = {name: value for name, value in os.environ.items() if name not in CACHES} | variables
    command = [sys.executable, "-m", "flashmem", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "variables", [NOWHERE, {"HOME": "/", "POCL_CACHE_DIR": ""}, {**NOWHERE, "POCL_CACHE_DIR": "/dev/null/x"}]
)
def test_no_device_vanishes_where_no_cache_can_be_written(variables: dict[str, str]) -> None:
    done = flashmem("devices", "--no-measure", "--json", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert [found["descriptor"] for found in json.loads(done.stdout)["devices"]] == [d.descriptor_name for d in list_devices()]


@pytest.mark.parametrize("device", CPUS)
def test_a_bundle_runs_where_no_cache_can_be_written(device: str, model: MiniModel, tmp_path: Path) -> None:
    done = flashmem("run", model.path, "--device", device, "--output", tmp_path / "y.npz", TMPDIR=str(tmp_path), **NOWHERE)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("flashmem: the program cache /dev/null/.cache/flashmem/programs cannot be written (Not a directory)")
    assert [path.name for path in tmp_path.iterdir()] == ["y.npz"], "nothing temporary stays"


def test_a_model_is_compiled_and_run_where_no_cache_can_be_written(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy")
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])
    graph = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["y"])], "scale", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), tmp_path / "scale.onnx")
    np.savez(tmp_path / "x.npz", x=np.ones(3, np.float32))
    (tmp_path / "temporary").mkdir()
    words = ("run", tmp_path / "scale.onnx", "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz")
    done = flashmem(*words, TMPDIR=str(tmp_path / "temporary"), **NOWHERE)
    assert done.returncode == 0, done.stderr
    assert "flashmem: /dev/null/.cache/flashmem cannot be written, so nothing is kept after this command; set" in done.stderr
    assert np.load(tmp_path / "y.npz")["y"].tolist() == [1, 2, 3]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_folders_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert paths.can_be_written(tmp_path / "a/b")
    assert not paths.can_be_written(tmp_path / "file")
    assert not paths.can_be_written(tmp_path / "file/a")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    monkeypatch.setattr(os, "access", lambda folder, mode: False)  # root may write everywhere
    assert not paths.can_be_written(tmp_path / "a/b")


def test_a_user_without_a_home_has_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    assert paths.cache_folder("programs") == Path("/.cache/flashmem/programs")


def test_no_temporary_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(icd.VARIABLE, raising=False)
    monkeypatch.setenv(pocl.VARIABLE, "/dev/null/x")
    monkeypatch.setattr(icd, "pip_runtimes", lambda: (tmp_path / "libintelocl.so",))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    monkeypatch.setattr(paths, "_TEMPORARY", ())
    for context in (icd.vendors_folder, pocl.writable_pocl_cache):
        with pytest.raises(UserError, match=r"no temporary folder can be written .*; set TMPDIR"), context():
            pass


def in_a_fork(function: Callable[[], object], seconds: float = 30) -> str:
    """The result of `function`, or the error that it raises, in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(function())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode() or b" ")
        os._exit(0)
    os.close(writer)
    try:
        if not select.select([reader], [], [], seconds)[0]:
            os.kill(child, signal.SIGKILL)
            pytest.fail(f"the child hangs: {function}")
        return os.read(reader, 4096).decode()
    finally:
        os.close(reader)
        os.waitpid(child, 0)


@pytest.mark.parametrize("device", CPUS)
def test_a_forked_child_is_told_to_open_a_session_of_its_own(device: str, model: MiniModel) -> None:
    inputs = model.inputs()
    with Session(model.path, device=device) as session:
        (expected,) = session.run(["y"], inputs)
        told = in_a_fork(lambda: session.run(["y"], inputs))
        assert told == "RunError: the session was opened before this process was forked; open one in the child"
        assert in_a_fork(session.close) == "None"
        np.testing.assert_array_equal(session.run(["y"], inputs)[0], expected)


@pytest.mark.parametrize("device", CPUS)
def test_a_session_opened_in_a_forked_child_works_or_says_why_not(device: str, model: MiniModel) -> None:
    def answer() -> str:
        with Session(model.path, device=device) as session:
            return session.run(["y"], model.inputs())[0].tobytes().hex()

    expected, forked = answer(), in_a_fork(answer)
    if device == "intel-cpu":
        assert forked == expected
    else:
        assert forked.startswith("RunError: ") and "its threads stayed behind; start the process with" in forked


class Calling(Mapping[str, NDArray[Any]]):
    """Inputs that call a function when they are read."""

    def __init__(self, inputs: Mapping[str, NDArray[Any]], call: Callable[[], object]) -> None:
        self._inputs, self._call = inputs, call

    def __getitem__(self, name: str) -> NDArray[Any]:
        self._call()
        return self._inputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._inputs)

    def __len__(self) -> int:
        return len(self._inputs)


@pytest.mark.parametrize("what", ["run", "close"])
def test_a_call_inside_a_run_is_one_sentence(what: str, session: Session, model: MiniModel) -> None:
    inner: Callable[[], object] = session.close if what == "close" else lambda: session.run(None, model.inputs())
    with pytest.raises(RunError, match=f"^{what} was called while the same thread is in a run of the session; let the run end"):
        session.run(None, Calling(model.inputs(), inner))
    assert len(session.run(None, model.inputs())) == 3


def test_a_signal_handler_that_runs_the_session_is_told_and_the_run_goes_on(
    session: Session, model: MiniModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    play = Run.execute

    def handler(*_: object) -> None:
        with pytest.raises(RunError) as caught:
            session.run(None, model.inputs())
        told.append(str(caught.value))

    def interrupted(run: Run, *ports: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return play(run, *ports, **options)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(Run, "execute", interrupted)
        assert len(session.run(None, model.inputs())) == 3
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert told == ["run was called while the same thread is in a run of the session; let the run end first"]


def test_threads_wait_for_each_other(session: Session, model: MiniModel) -> None:
    inputs = model.inputs()
    (expected,) = session.run(["y"], inputs)
    answers: list[NDArray[Any]] = []
    threads = [threading.Thread(target=lambda: answers.extend(session.run(["y"], inputs))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(answers) == 4
    assert all(np.array_equal(answer, expected) for answer in answers)


@pytest.mark.parametrize(
    ("outputs", "change", "sentence"),
    [
        (None, lambda inputs: None, "the inputs are None; give a dict of numpy arrays by name"),
        (None, lambda inputs: list(inputs.values()), "the inputs are a list; give a dict"),
        (None, lambda inputs: inputs["x"], "the inputs are a ndarray; give a dict"),
        (None, lambda inputs: {**inputs, 3: inputs["x"]}, "the inputs are called by an int; call them by their names as text"),
        (None, lambda inputs: {**inputs, "x": None}, "input 'x' is None; give a numpy array"),
        (None, lambda inputs: {**inputs, "x": 1.0}, r"input 'x' has shape \(\)"),
        (None, lambda inputs: {**inputs, "x": np.float32(1)}, r"input 'x' has shape \(\)"),
        (None, lambda inputs: {**inputs, "x": inputs["x"].astype(object)}, "input 'x' is object; the model takes float32"),
        (None, lambda inputs: {**inputs, "x": inputs["x"].astype(">f4")}, "input 'x' is >f4; the model takes float32"),
        (
            None,
            lambda inputs: {**inputs, "tokens": inputs["tokens"].astype(">i8")},
            "input 'tokens' is >i8; the model takes int64",
        ),
        (None, lambda inputs: {**inputs, "x": np.ma.masked_less(inputs["x"], 0)}, "input 'x' is a masked array"),
        ("y", dict, "the requested outputs are a str; give a list of names, or None for all"),
        (7, dict, "the requested outputs are an int"),
        ({"y": 1}, dict, "the requested outputs are a dict"),
        ([None], dict, "the requested outputs contain None; give their names as text"),
        ([["y"]], dict, "the requested outputs contain a list"),
    ],
)
def test_arguments_of_another_type_are_one_sentence(
    outputs: Any, change: Callable[[Any], Any], sentence: str, session: Session, model: MiniModel
) -> None:
    with pytest.raises(ValueError, match=sentence):
        session.run(outputs, change(model.inputs()))
    assert len(session.run(("y",), model.inputs())) == 1


def test_strided_and_read_only_arrays_are_taken_as_they_are(session: Session, model: MiniModel) -> None:
    inputs = model.inputs()
    (expected,) = session.run(["y"], inputs)
    strided = np.repeat(inputs["x"], 3)[::3]
    strided.flags.writeable = False
    np.testing.assert_array_equal(session.run(["y"], {**inputs, "x": strided})[0], expected)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"bundle": None}, "a session is opened with a bundle, a model or the path of one, not with None"),
        ({"device": 0}, "the device is an int; give its name as text"),
        ({"mode": 3}, "transfer mode 3 is unknown"),
        ({"strategy": 3}, "strategy 3 is unknown"),
        ({"budget": 1.5}, "budget '1.5' is not a size"),
        ({"budget": "9" * 400}, "budget '9+' is not a size"),
    ],
)
def test_sessions_are_not_opened_with_arguments_of_another_type(
    arguments: dict[str, Any], sentence: str, model: MiniModel
) -> None:
    with pytest.raises(UserError, match=sentence):
        Session(**{"bundle": model.path, **arguments})


def test_file_names_of_any_bytes(tmp_path: Path) -> None:
    """The name of a file is printed byte by byte; in an ONNX model, where paths are UTF-8, it is refused."""
    name = os.fsdecode(b"caf\xe9")
    process = [
        sys.executable,
        "-c",
        "import sys; from flashmem.base.streams import prepare_streams, say; prepare_streams();",
    ]
    process[-1] += "print(sys.argv[1]); say(sys.argv[1] + '\\ud800')"
    done = subprocess.run([*process, name], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"caf\xe9\n", b"flashmem: caf\\udce9\\ud800\n")
    model = tmp_path / f"{name}.onnx"
    model.write_bytes((DATA / "mobilenet-tiny.onnx").read_bytes())
    with pytest.raises(UserError, match="ONNX names files in UTF-8"):
        load_mapped(model)
