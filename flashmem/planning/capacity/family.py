"""The predictor of a GPU family: two XGBoost models trained on compiled code, for GPUs that were never measured.

The first predicts the ratio of a launch's latency to that of an ideal kernel on the GPU (`Hardware.ideal_seconds`). The second
predicts the factor by which streaming slows the launch down. The facts of the GPU are features, so that one pair of models
serves all GPUs of a family, also one that it was not trained with. The files are those of `predictor`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.planning.capacity.features import KERNEL_FEATURES, LaunchFeatures, Matrix, kernel_features, launch_features
from flashmem.planning.capacity.hardware import HARDWARE_FEATURES, Hardware
from flashmem.planning.capacity.model import SECONDS, SLOWDOWN
from flashmem.planning.capacity.predictor import load_trees, ratio_within
from flashmem.planning.capacity.trees import Trees
from flashmem.program.launches import Launch
from flashmem.schedule.modes import ALIAS, DMA, INTERLEAVE
from flashmem.target.descriptor import DeviceDescriptor

FORMAT_VERSION: Final = 1
ATTRIBUTE: Final = "flashmem_family"
"""The attribute of a model with its origin: `{"version", "features", "source"}`."""

_UNUSED: Final = KERNEL_FEATURES.index("log_roofline")
CODE_FEATURES: Final = (*(name for name in KERNEL_FEATURES if name != "log_roofline"), *HARDWARE_FEATURES)
"""Features of a launch on a GPU."""

FAMILY_MODES: Final = tuple(kind.name for kind in (ALIAS, DMA, INTERLEAVE))
"""The modes of the training data. `map` writes to shared memory, as `alias` does."""

STREAM_FEATURES: Final = (
    *CODE_FEATURES, "log_over_ideal", *(f"mode_{mode}" for mode in FAMILY_MODES), "log_last_over_memory", "contention",
    "share", "share_of_host", "share_of_slots", "share_of_memory", "log_bytes_per_item",
)  # fmt: skip
"""Features of a launch with bytes streamed during it. A share is the time that the bytes need alone of one resource, over the
latency of the launch alone."""

STREAM_GROWING: Final = frozenset(STREAM_FEATURES[-5:])
"""Features that grow with the streamed bytes: predictions must not fall as they grow."""

SHARES: Final = np.array([0, 0.002, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6], np.float64)
"""The amounts of bytes at which the slowdown is predicted, as shares (`STREAM_FEATURES`) of the mode's last step. The second is
next to nothing: in `interleave` another kernel runs as soon as a byte is moved."""


def code_features(launches: Sequence[LaunchFeatures], gpus: Sequence[Hardware]) -> Matrix:
    """float32 [launches, CODE_FEATURES], each on the GPU of the same place."""
    kernels = np.delete(kernel_features(launches, [1.0] * len(launches)), _UNUSED, 1)
    facts = np.array([gpu.features(launch) for launch, gpu in zip(launches, gpus, strict=True)], np.float32)
    return np.concatenate([kernels, facts.reshape(len(launches), len(HARDWARE_FEATURES))], 1)


def stream_features(
    code: Matrix,
    launches: Sequence[LaunchFeatures],
    gpus: Sequence[Hardware],
    seconds: NDArray[np.float64],
    modes: Sequence[TransferMode],
    shares: NDArray[np.float64],
) -> Matrix:
    """float32 [launches x shares, STREAM_FEATURES]: each launch in its mode, with `shares` [launches, shares] of bytes.

    `seconds` are of the launches alone.
    """
    count = shares.shape[1]
    last = np.array([gpu.last[_known(mode)] for gpu, mode in zip(gpus, modes, strict=True)])
    ideal = np.array([gpu.ideal_seconds(launch) for gpu, launch in zip(gpus, launches, strict=True)])
    memory, host, slots = (np.array([getattr(gpu, name) for gpu in gpus]) for name in ("memory", "host", "slots"))
    contention = np.array([gpu.contention.get(_known(mode), 0.0) for gpu, mode in zip(gpus, modes, strict=True)])
    flags = np.array([[_known(mode) == known for known in FAMILY_MODES] for mode in modes], np.float64)
    fixed = [np.log2(seconds / ideal)[:, None], flags, np.log2(last / memory)[:, None], contention[:, None]]
    nbytes = shares * (last * seconds)[:, None]
    items = np.array([float(launch.items) for launch in launches])
    grown = [shares, *(nbytes / (rate * seconds)[:, None] for rate in (host, slots, memory))]
    grown.append(np.log2(1 + nbytes / items[:, None]))
    alone = np.repeat(np.concatenate([code, *fixed], 1), count, 0)
    return np.concatenate([alone, np.stack(grown, 2).reshape(-1, len(grown))], 1).astype(np.float32)


def _known(mode: TransferMode) -> TransferMode:
    return mode if mode in FAMILY_MODES else ALIAS.name


class FamilyPredictor:
    """Both models of a family on one GPU, for launches of programs on one memory path."""

    def __init__(self, seconds: Trees, slowdown: Trees, gpu: Hardware, path: MemoryPath) -> None:
        self._trees, self._gpu, self._path = (seconds, slowdown), gpu, path
        self._seconds: dict[LaunchFeatures, float] = {}
        self._curves: dict[tuple[LaunchFeatures, TransferMode], NDArray[np.float64]] = {}

    @property
    def note(self) -> str:
        """States what it was trained on."""
        return f"load capacities from {json.loads(self._trees[0].attributes[ATTRIBUTE])['source']}"

    @property
    def tells_classes(self) -> bool:
        """Yes: every kernel was compiled with its copy stream."""
        return True

    def prepare(self, launches: Iterable[tuple[Launch, int]], mode: TransferMode) -> None:
        """Predict launches, each with the bytes of its weights, in one batch."""
        found = dict.fromkeys(launch_features(launch, nbytes, self._path) for launch, nbytes in launches)
        self._predict([each for each in found if (each, mode) not in self._curves], mode)

    def seconds(self, launch: Launch, weight_bytes: int = 0) -> float:
        """Latency alone."""
        return self.seconds_of(launch_features(launch, weight_bytes, self._path))

    def loaded_seconds(self, launch: Launch, weight_bytes: int, streamed_bytes: float, mode: TransferMode) -> float:
        """Latency with bytes streamed during it. Beyond the trained range, more bytes add their full time."""
        features = launch_features(launch, weight_bytes, self._path)
        alone, last = self.seconds_of(features), self._gpu.last[mode]
        share = streamed_bytes / (last * alone)
        beyond = max(0.0, share - float(SHARES[-1])) * alone
        return float(np.interp(share, SHARES, self.curve_of(features, mode))) * alone + beyond

    def streamable_bytes(self, launch: Launch, weight_bytes: int, slowdown: float, mode: TransferMode) -> float:
        """The most bytes within a slowdown, at most as many as models were trained with."""
        return self.streamable_of(launch_features(launch, weight_bytes, self._path), slowdown, mode)

    def seconds_of(self, features: LaunchFeatures) -> float:
        """`seconds` of a launch, from its features."""
        if features not in self._seconds:
            self._predict_alone([features])
        return self._seconds[features]

    def curve_of(self, features: LaunchFeatures, mode: TransferMode) -> NDArray[np.float64]:
        """The factor by which streaming slows the launch down, at `SHARES`; at least 1, and never falling."""
        if (features, mode) not in self._curves:
            self._predict([features], mode)
        return self._curves[features, mode]

    def streamable_of(self, features: LaunchFeatures, slowdown: float, mode: TransferMode) -> float:
        """`streamable_bytes` of a launch, from its features."""
        share = ratio_within(SHARES, self.curve_of(features, mode), slowdown)
        return share * self.seconds_of(features) * self._gpu.last[mode]

    def _predict_alone(self, launches: Sequence[LaunchFeatures]) -> Matrix:
        code = code_features(launches, [self._gpu] * len(launches))
        over = np.exp(self._trees[0].predict(code).astype(np.float64))
        for launch, factor in zip(launches, over.tolist(), strict=True):
            self._seconds[launch] = self._gpu.ideal_seconds(launch) * factor + self._gpu.launch_seconds
        return code

    def _predict(self, launches: Sequence[LaunchFeatures], mode: TransferMode) -> None:
        if not launches:
            return
        code, count = self._predict_alone(launches), len(launches)
        alone = np.array([self._seconds[launch] for launch in launches])
        shares = np.broadcast_to(SHARES, (count, len(SHARES)))
        rows = stream_features(code, launches, [self._gpu] * count, alone, [mode] * count, shares)
        found = np.exp(np.maximum(self._trees[1].predict(rows), 0.0).astype(np.float64)).reshape(count, -1)
        found[:, 0] = 1.0
        for launch, curve in zip(launches, np.maximum.accumulate(found, 1), strict=True):
            self._curves[launch, mode] = curve


def load_family(name: str, descriptor: DeviceDescriptor, path: MemoryPath) -> FamilyPredictor:
    """The predictor of the models called `name`, for the GPU of `descriptor`.

    Raises:
        UserError: they are damaged, of another version, or the descriptor has no [pipelines].
    """
    if descriptor.pipelines is None:
        raise UserError(
            f"device descriptor {descriptor.name} names {name}, trained on compiled code, and has no [pipelines]; add them"
        )
    seconds, slowdown = (load_trees(name, suffix) for suffix in (SECONDS, SLOWDOWN))
    for each, suffix, features in ((seconds, SECONDS, CODE_FEATURES), (slowdown, SLOWDOWN, STREAM_FEATURES)):
        about = json.loads(each.attributes[ATTRIBUTE])
        if about.get("version") != FORMAT_VERSION or tuple(about.get("features", ())) != features:
            raise UserError(f"capacity model {name}{suffix} is of another version of flashmem; train it again")
    return _family(seconds, slowdown, Hardware.of(descriptor), path)


@lru_cache(maxsize=16)
def _family(seconds: Trees, slowdown: Trees, gpu: Hardware, path: MemoryPath) -> FamilyPredictor:
    """The predictor of two models. A program is planned several times, and most of its launches are the same each time."""
    return FamilyPredictor(seconds, slowdown, gpu, path)
