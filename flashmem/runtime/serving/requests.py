"""Open models and answers to requests, as users see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol, Self

from numpy.typing import NDArray

from flashmem.bundle.bundle import Bundle
from flashmem.runtime.engine.futures import FencedFuture
from flashmem.runtime.engine.given_arrays import Input
from flashmem.runtime.engine.ports import PROVIDER, TensorInfo, tensor_infos
from flashmem.runtime.engine.report import RunReport
from flashmem.runtime.serving.loaded_model import LoadedModel

Array = NDArray[Any]


class Answer(FencedFuture[list[Array]]):
    """The future outputs of a request. A request can be cancelled until it begins.

    `submitted`, `started` and `finished` are seconds of `time.perf_counter()`; `report` describes the run. The answer holds
    `inputs` while the run may need them. Among waiting requests the one with the highest `priority` begins next.
    """

    def __init__(
        self, model: Model, loaded: LoadedModel, inputs: Mapping[str, Input], names: Sequence[str], priority: int = 0
    ) -> None:
        super().__init__()
        self.priority = priority
        self.model = model
        self.loaded = loaded
        self.names = names  # `loaded` is the variant with these input shapes
        self.submitted = perf_counter()
        self.started = self.finished = 0.0
        self.report: RunReport | None = None
        self.inputs: dict[str, Input] = dict(inputs)


class ModelRunner(Protocol):
    """The runtime of a model (`flashmem.Runtime`), as the model needs it."""

    def submit(
        self, model: Model, inputs: Mapping[str, Any], output_names: Sequence[str] | None = None, *, priority: int = 0
    ) -> Answer:
        """Queue a run of `model`."""

    def close_model(self, model: Model) -> None:
        """Give everything of `model` back."""

    def refuse_inside(self, what: str) -> None:
        """Raise RunError in the runtime's own thread."""


class Model:
    """A bundle open in a runtime. It runs like a session, and shares device and budget with other models."""

    def __init__(self, runtime: ModelRunner, variants: Sequence[LoadedModel], bundle: Bundle) -> None:
        self._runtime = runtime
        self.bundle = bundle
        self.variants = tuple(variants)  # one for each shape variant
        self.ports = [variant.program.inputs for variant in bundle.variants]
        self.output_ports = bundle.program.outputs
        self.loaded = self.variants[bundle.index]
        self.last_run: RunReport | None = None

    @property
    def failure(self) -> str | None:
        """The reason why the model was closed; None while it is open."""
        return self.loaded.failure

    def submit(self, inputs: Mapping[str, Any], output_names: Sequence[str] | None = None, *, priority: int = 0) -> Answer:
        """See `Runtime.submit`."""
        return self._runtime.submit(self, inputs, output_names, priority=priority)

    def run(self, output_names: Sequence[str] | None, inputs: Mapping[str, Any], *, priority: int = 0) -> list[Array]:
        """Run the model once, when its turn comes (`Runtime.submit`). Returns and raises what `Session.run` does.

        Raises:
            RunError: also in a callback of a future: the runtime's own thread would wait for itself.
        """
        self._runtime.refuse_inside("run")
        answer = self.submit(inputs, output_names, priority=priority)
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

    def get_providers(self) -> list[str]:
        """The provider, as `Session.get_providers`."""
        return [PROVIDER]

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
