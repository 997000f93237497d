"""Models that are open in a runtime, and the answers to requests, as users see both.

All callbacks of an answer are called, whatever one of them raises. `concurrent.futures` logs an Exception that a callback
raises, and calls the next one. A KeyboardInterrupt or a SystemExit ends its loop, and leaves the method that completed the
future: others would wait for ever. Here it is held back until all callbacks were called. A thread of the user's then gets it
from the method that it called; the thread of a runtime, which other models depend on, logs it.
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
from flashmem.runtime.engine.report import RunReport
from flashmem.runtime.serving.loaded_model import LoadedModel

Array = NDArray[Any]
Result = TypeVar("Result")
_LOGGER = logging.getLogger("flashmem")


class FencedFuture(Future[Result]):
    """A future that calls all its callbacks, also after one that raises KeyboardInterrupt or SystemExit."""

    def __init__(self) -> None:
        super().__init__()
        self._raised: dict[int, BaseException] = {}  # by the thread that called the callback

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        """Call `fn` with the future when it is done; at once, if it is. Raises then what `fn` raises that is no Exception."""
        super().add_done_callback(partial(_call, fn))
        self._raise()

    def cancel(self) -> bool:
        """Cancel a request that has not begun; returns whether it is cancelled. Raises, after all callbacks, what one of them
        raised that is no Exception.
        """
        cancelled = super().cancel()
        self._raise()
        return cancelled

    def raised(self) -> BaseException | None:
        """What callbacks that this thread called raised that is no Exception, the first one; None the next time."""
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
    """`act` completes `future`, in a thread that others depend on: what callbacks raise is logged."""
    act()
    error = future.raised()
    if error is not None:
        _LOGGER.error("a callback of a future raised %s", type(error).__name__, exc_info=error)


def complete_cancelled(future: FencedFuture[Any]) -> None:
    """Cancel a request in a thread that others depend on, and notify who waits for it."""
    complete(future, partial(Future.cancel, future))
    future.set_running_or_notify_cancel()


class Answer(FencedFuture[list[Array]]):
    """The outputs of a request, when they are there. A request can be cancelled until it begins.

    `submitted`, `started` and `finished` are seconds of `time.perf_counter()`; `report` is of the run. `inputs` are held
    while the run may need them.
    """

    def __init__(self, model: Model, loaded: LoadedModel, inputs: Mapping[str, Array], names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.loaded, self.names = model, loaded, names  # loaded: the variant that takes the inputs
        self.submitted = perf_counter()
        self.started = self.finished = 0.0
        self.report: RunReport | None = None
        self.inputs: dict[str, Array] = dict(inputs)


class ModelRunner(Protocol):
    """The runtime of a model (`flashmem.Runtime`), as the model needs it."""

    def submit(self, model: Model, inputs: Mapping[str, Array], output_names: Sequence[str] | None = None) -> Answer:
        """Queue a run of `model`."""

    def close_model(self, model: Model) -> None:
        """Give everything of `model` back."""

    def refuse_inside(self, what: str) -> None:
        """Raise RunError in the runtime's own thread."""


class Model:
    """A bundle open in a runtime. It runs like a session, among others."""

    def __init__(self, runtime: ModelRunner, variants: Sequence[LoadedModel], bundle: Bundle) -> None:
        self._runtime, self.bundle = runtime, bundle
        self.variants = tuple(variants)  # one for each shape variant
        self.ports = [variant.program.inputs for variant in bundle.variants]
        self.output_ports = bundle.program.outputs
        self.loaded = self.variants[bundle.index]
        self.last_run: RunReport | None = None

    @property
    def failure(self) -> str | None:
        """Why the model was closed; None while it is open."""
        return self.loaded.failure

    def submit(self, inputs: Mapping[str, Array], output_names: Sequence[str] | None = None) -> Answer:
        """See `Runtime.submit`."""
        return self._runtime.submit(self, inputs, output_names)

    def run(self, output_names: Sequence[str] | None, inputs: Mapping[str, Array]) -> list[Array]:
        """Run the model once, after all requests submitted before. Returns and raises what `Session.run` does.

        Raises:
            RunError: also in a callback of a future: the runtime's own thread would wait for itself.
        """
        self._runtime.refuse_inside("run")
        answer = self.submit(inputs, output_names)
        del self, inputs  # who keeps an error would keep the model, and all that its bundle says, by the variables of this call
        try:
            return answer.result()
        finally:
            del answer

    def close(self) -> None:
        """Give everything of the model back, once a run of it that is under way is over. Its waiting requests fail."""
        self._runtime.close_model(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
