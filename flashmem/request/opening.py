"""What a user asks of a session: the keywords of `Session`, `Generator` and `BatchGenerator`.

All options of a bundle are among them, for a model that is compiled first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flashmem.request.description import Converted, argument, choice, option
from flashmem.request.kinds import Flag, Kind, Size
from flashmem.request.limits import MEMORY, PLAN, Bytes
from flashmem.request.request import BundleRequest
from flashmem.schedule.residency import Strategy

if TYPE_CHECKING:
    import onnx

    from flashmem.bundle.bundle import Bundle

HostBytes = Converted[int | str | None, int | Literal["auto"] | None]


class RunRequest(BundleRequest):
    """What runs of a bundle, or of a model that is compiled first, are asked for. Some options have more values here."""

    asker = "a session"

    host_budget: HostBytes = option(  # type: ignore[assignment]
        "Limit on host memory for staging and for weights that later runs copy; for a device with memory of its own.",
        default=None,
        kind=Size("SIZE|auto", auto="auto"),
        doc="most bytes of pinned host memory, for a device with memory of its own: for staging and outputs, and for weights "
        'that later runs copy from there instead of reading them. "auto": half of the memory that the system has left, at most '
        "what the session can use; nothing where host and device share memory. None: no limit, and no weights are kept on the "
        "host.",
        shown="none: no weights are kept there",
        scope="both",
        group=MEMORY,
    )
    strategy: Strategy | Literal["auto"] = option(  # type: ignore[assignment]
        "When weights are loaded; all but stream are baselines.",
        default="auto",
        kind=choice((Strategy, "auto")),
        doc='"auto" follows the plan, of any strategy. "preload" makes everything resident first, as other engines do. Any '
        "other name must be the strategy that the bundle was compiled with.",
        shown="stream",
        scope="both",
        group=PLAN,
    )

    @property
    def of_session(self) -> dict[str, Any]:
        """The fields that were given, and are a session's own."""
        return {name: value for name, value in self.given.items() if self.options[name].scope != "compile"}

    @property
    def of_bundle(self) -> BundleRequest:
        """What a model is compiled for. A strategy or a host budget that no plan has is left out."""
        given = {name: value for name, value in self.given.items() if name in BundleRequest.options}
        if self.strategy in ("auto", "preload"):
            given.pop("strategy", None)
        if self.host_budget == "auto" or self.strategy == "preload":
            given.pop("host_budget", None)
        return BundleRequest(**given)


class SessionRequest(RunRequest):
    """What a session is opened with."""

    process_memory: Bytes = option(
        "Limit on the whole process, driver and interpreter too, in place of --budget; for instance 300MB.",
        default=None,
        kind=Size(),
        doc="most bytes that the whole process may hold resident, in place of `budget`. The budget is then less by what the "
        "process holds when the device's context exists, and by `SLACK` of `flashmem.runtime.request.process_memory`. The "
        "model is planned for it, if its own plan needs more.",
        scope="session",
        group=MEMORY,
    )


class CheckedSessionRequest(SessionRequest):
    """What a session is opened with that may check weights and kernels."""

    verify_weights: bool = option(
        "Compare weights with their checksums when read.",
        default=False,
        kind=Flag(no=""),
        doc="compare every slice and table row that is read with its checksum; damage fails the run. Constants are always "
        "compared.",
        flags=("--check-weights",),
        scope="session",
    )
    check_kernels: bool = option(
        "First check kernels that no check on this device has found right.",
        default=False,
        doc="before anything runs, check the kernels that no earlier check has found right on this device, in child processes "
        "(docs/reference/internals/kernel-check.md). A kernel that its driver miscompiles is compiled without optimisation, or "
        "refused.",
        scope="session",
    )


class SessionCall(CheckedSessionRequest):
    """The keywords of `Session`."""

    bundle: Bundle | str | Path | bytes | onnx.ModelProto = argument(
        "An .onnx model, or a bundle.",
        kw_only=False,
        kind=Kind("MODEL"),
        doc="a bundle or its path. Or a model, which is compiled first unless the user's cache has its bundle: the path of an "
        "ONNX or GGUF file, the bytes of an ONNX file, or an `onnx.ModelProto`. `flashmem run` uses the same cache.",
    )
    lanes: bool = option(
        None,
        default=True,
        doc='in mode "interleave", whether kernels copy weights while they compute; if not, separate launches between them '
        "copy, for comparison.",
        scope="session",
    )
    trace: bool = option(None, default=False, doc="record when each launch ran on the device.", scope="session")
    build_apart: bool = option(
        None,
        default=True,
        doc="build kernels that no cache has in child processes, whose memory is freed when they end. If not, they are built "
        "in this process, which then keeps a compiler's 200 to 400 MB. False is for callers that open many sessions, or cannot "
        "start processes.",
        scope="session",
    )
    prepare: bool = option(
        None,
        default=True,
        doc="between two runs, begin the loads of the next one, and prepare the bundle's steady kernels for later runs. A "
        "session that traces prepares nothing.",
        scope="session",
    )


class GeneratorCall(SessionRequest):
    """The keywords of `Generator` and `BatchGenerator`."""

    asker = "a generator"

    bundle: Bundle | str | Path = argument(
        "A language model: a .gguf file, a folder, or a bundle.",
        kw_only=False,
        kind=Kind("MODEL"),
        doc="a bundle of a language model; or the model, which is compiled through the cache.",
    )
    draft: Bundle | str | Path | None = option(
        "A small model with the same tokens, whose drafts are checked.",
        default=None,
        kind=Kind("MODEL"),
        doc="a bundle of a small model with the same tokens, whose drafts a `Generator` checks. It stays in memory. The budget "
        "counts it too, and a process memory is for one model.",
        scope="session",
    )
