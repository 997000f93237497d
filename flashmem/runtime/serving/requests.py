"""What a user holds of a runtime: models that are open in it, and the answers to requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from numpy.typing import NDArray

from flashmem.runtime.engine.report import RunReport
from flashmem.runtime.serving.futures import FencedFuture
from flashmem.runtime.serving.loaded_model import Tenant

if TYPE_CHECKING:
    from flashmem.bundle.bundle import Bundle
    from flashmem.runtime.serving.runtime import Runtime

Array = NDArray[Any]


class Answer(FencedFuture[list[Array]]):
    """The outputs of a request, when they are there. A request can be cancelled until it begins.

    `submitted`, `started` and `finished` are seconds of `time.perf_counter()`; `report` is of the run. `inputs` are held until
    it is over.
    """

    def __init__(self, model: Model, tenant: Tenant, inputs: Mapping[str, Array], names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.tenant, self.names = model, tenant, names  # the tenant of the shapes that the inputs have
        self.submitted = perf_counter()
        self.started = self.finished = 0.0
        self.report: RunReport | None = None
        self.inputs: dict[str, Array] = dict(inputs)


class Model:
    """A bundle open in a runtime. It runs like a session, among others."""

    def __init__(self, runtime: Runtime, tenants: Sequence[Tenant], bundle: Bundle) -> None:
        self._runtime, self.bundle = runtime, bundle
        self.tenants = tuple(tenants)  # one for each shape variant
        self.last_run: RunReport | None = None

    @property
    def tenant(self) -> Tenant:
        """The one of the shape variant that the bundle stood for when it was opened."""
        return self.tenants[self.bundle.index]

    @property
    def failure(self) -> str | None:
        """Why the model was closed; None while it is open."""
        return self.tenant.failure

    def submit(self, inputs: Mapping[str, Array], output_names: Sequence[str] | None = None) -> Answer:
        """See `Runtime.submit`."""
        return self._runtime.submit(self, inputs, output_names)

    def run(self, output_names: Sequence[str] | None, inputs: Mapping[str, Array]) -> list[Array]:
        """Run the model once, when its turn comes; what `Session.run` gives and raises.

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
