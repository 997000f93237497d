"""Open models and answers to requests, as users see them.

An answer calls all its callbacks, even if one of them raises. `concurrent.futures` logs an Exception of a callback, and calls
the next one. A KeyboardInterrupt or a SystemExit ends its loop, and leaves the method that completed the future: waiting
threads would wait for ever. Here such an exception waits until all callbacks have run. A user's thread then receives it from
the method that it called. The thread of a runtime, which other models depend on, logs it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from numpy.typing import NDArray

from flashmem.bundle.bundle import Bundle
from flashmem.runtime.engine.ports import TensorInfo, tensor_infos
from flashmem.runtime.engine.report import RunReport
from flashmem.runtime.serving.loaded_model import LoadedModel

Array = NDArray[Any]
Result = TypeVar("Result")
_LOGGER = logging.getLogger("flashmem")


class FencedFuture(Future[Result]):
    """A future that calls all its callbacks, even after one raises KeyboardInterrupt or SystemExit."""

    def __init__(self) -> None:
        super().__init__()
        self._raised: dict[int, BaseException] = {}  # by the thread that called the callback

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with the future when it is done, or now if it is. In the second case, raises what `fn` raises but
        Exception.
        """
        super().add_done_callback(partial(_call, fn))
        self._raise()

    def cancel(self) -> bool:
        """Cancel a request that has not begun; returns whether it is cancelled. After all callbacks, raises what one of them
        raised, except an Exception.
        """
        cancelled = super().cancel()
        self._raise()
        return cancelled

    def raised(self) -> BaseException | None:
        """The first non-Exception that callbacks called by this thread raised; None at the next call."""
        return self._raised.pop(threading.get_ident(), None)

    def _raise(self) -> None:
        error = self.raised()
        if error is not None:
            raise error


def _call(fn: Callable[[Any], object], future: FencedFuture[Any]) -> None:
    try:
        fn(future)
    except Exception:
        raise  # the future logs it
    except BaseException as error:
        future._raised.setdefault(threading.get_ident(), error)


def complete(future: FencedFuture[Any], act: Callable[[], object]) -> None:
    """Complete `future` by `act`, in a thread that others depend on: exceptions of callbacks are logged."""
    act()
    error = future.raised()
    if error is not None:
        _LOGGER.error("a callback of a future raised %s", type(error).__name__, exc_info=error)


def complete_cancelled(future: FencedFuture[Any]) -> None:
    """Cancel a request in a thread that others depend on, and notify waiting threads."""
    complete(future, partial(Future.cancel, future))
    future.set_running_or_notify_cancel()


class Answer(FencedFuture[list[Array]]):
    """The future outputs of a request. A request can be cancelled until it begins.

    `submitted`, `started` and `finished` are seconds of `time.perf_counter()`; `report` describes the run. The answer holds
    `inputs` while the run may need them.
    """

    def __init__(self, model: Model, loaded: LoadedModel, inputs: Mapping[str, Array], names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.loaded, self.names = model, loaded, names  # loaded: the variant with these input shapes
        self.submitted = perf_counter()
        self.started = self.finished = 0.0
        self.report: RunReport | None = None
        self.inputs: dict[str, Array] = dict(inputs)


class ModelRunner(Protocol):
    """The runtime of a model (`flashmem.Runtime`), as the model needs it."""

    def submit(self, model: Model, inputs: Mapping[str, Any], output_names: Sequence[str] | None = None) -> Answer:
        """Queue a run of `model`."""

    def close_model(self, model: Model) -> None:
        """Give everything of `model` back."""

    def refuse_inside(self, what: str) -> None:
        """Raise RunError in the runtime's own thread."""


class Model:
    """A bundle open in a runtime. It runs like a session, and shares device and budget with other models."""

    def __init__(self, runtime: ModelRunner, variants: Sequence[LoadedModel], bundle: Bundle) -> None:
        self._runtime, self.bundle = runtime, bundle
        self.variants = tuple(variants)  # one for each shape variant
        self.ports = [variant.program.inputs for variant in bundle.variants]
        self.output_ports = bundle.program.outputs
        self.loaded = self.variants[bundle.index]
        self.last_run: RunReport | None = None

    @property
    def failure(self) -> str | None:
        """The reason why the model was closed; None while it is open."""
        return self.loaded.failure

    def submit(self, inputs: Mapping[str, Any], output_names: Sequence[str] | None = None) -> Answer:
        """See `Runtime.submit`."""
        return self._runtime.submit(self, inputs, output_names)

    def run(self, output_names: Sequence[str] | None, inputs: Mapping[str, Any]) -> list[Array]:
        """Run the model once, after all earlier requests. Returns and raises what `Session.run` does.

        Raises:
            RunError: also in a callback of a future: the runtime's own thread would wait for itself.
        """
        self._runtime.refuse_inside("run")
        answer = self.submit(inputs, output_names)
        del self, inputs  # the frame, kept by an error, would keep the model and its bundle
        try:
            return answer.result()
        finally:
            del answer

    def get_inputs(self) -> list[TensorInfo]:
        """The inputs, as `Session.get_inputs`."""
        return tensor_infos(self.ports)

    def get_outputs(self) -> list[TensorInfo]:
        """The outputs, as `Session.get_inputs`."""
        return tensor_infos([variant.program.outputs for variant in self.bundle.variants])

    def __repr__(self) -> str:
        state = "open" if self.failure is None else f"closed: {self.failure}"
        return f"<Model {self.bundle.model} in a Runtime, {state}>"

    def close(self) -> None:
        """Close the model and free its memory, after its current run. Its waiting requests fail."""
        self._runtime.close_model(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
