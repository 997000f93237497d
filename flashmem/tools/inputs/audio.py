"""Audio files as arrays: one channel, at the rate that a model wants. `read_audio` needs the `inputs` extra (SciPy)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.extras import need
from flashmem.tools.inputs.description import PREPROCESSOR, Description, ModelInput

GUESSED_RATE = 16_000
_SHORTEST = 100  # samples: a shorter fixed dimension is not time


@dataclass(frozen=True)
class AudioFormat:
    """A waveform as a model's input: float samples of -1 to 1 at `rate` hertz.

    `samples` cuts or fills the end with zeros; None keeps the length. `normalize` gives zero mean and unit variance.
    """

    rate: int
    samples: int | None = None
    normalize: bool = False
    dtype: str = "float32"


def audio_format(model: Description, port: ModelInput, rate: int | None) -> tuple[AudioFormat, str]:
    """The format of audio for `port`, and a sentence that says it and what was guessed. `rate`: as the user gave it."""
    config = model.config(PREPROCESSOR)
    stored = config.get("sampling_rate") or model.value("sample_rate") or model.value("sampling_rate")
    known = rate or (stored if isinstance(stored, int) and stored > 0 else None)
    normalize = bool(config.get("do_normalize")) and config.get("feature_extractor_type") == "Wav2Vec2FeatureExtractor"
    axis = time_axis(port.shape)
    assert axis is not None
    made = AudioFormat(known or GUESSED_RATE, port.shape[axis], normalize, port.dtype)
    words = f"{made.rate} Hz, one channel{', zero mean and unit variance' if normalize else ''}"
    source = "flags" if rate else PREPROCESSOR if config.get("sampling_rate") else "the model's metadata"
    return made, words + (f"; from {source}" if known else "; guessed: the rate (--rate)")


def is_waveform(port: ModelInput) -> bool:
    """Whether an input may be a waveform of one channel."""
    return port.dtype in ("float32", "float16", "float64") and time_axis(port.shape) is not None


def time_axis(shape: Sequence[int | None]) -> int | None:
    """The dimension of samples: the only long one, or else the last if it is open. None if others are not one.

    The first may be open too, for a batch of one.
    """
    long = [axis for axis, size in enumerate(shape) if size is not None and size >= _SHORTEST]
    axis = long[0] if len(long) == 1 else len(shape) - 1
    fits = len(shape) in (1, 2, 3) and len(long) <= 1 and (long or shape[axis] is None)
    ones = all(size == 1 or (index == 0 and size is None) for index, size in enumerate(shape) if index != axis)
    return axis if fits and ones else None


def read_audio(path: str | Path, wanted: AudioFormat) -> NDArray[Any]:
    """The samples in a WAV file: shape (samples,), the mean of its channels, resampled by a polyphase filter.

    Raises:
        MissingFileError: no such file.
        UserError: not a WAV file that SciPy reads, one without samples, or SciPy is missing.
    """
    need("audio", "scipy")
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path}: no such audio file")
    try:
        rate, samples = wavfile.read(path)
    except Exception as error:  # a damaged file can raise any exception
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is not a WAV file that can be read ({reason}); convert it with sox or ffmpeg") from error
    if samples.size == 0 or rate <= 0:
        raise UserError(f"{path} has no samples")
    wave = _floats(samples).reshape(len(samples), -1).mean(axis=1)
    if rate != wanted.rate:
        common = gcd(rate, wanted.rate)
        wave = resample_poly(wave, wanted.rate // common, rate // common)
    if wanted.normalize:
        wave = (wave - wave.mean()) / np.sqrt(wave.var() + 1e-7)  # as transformers' Wav2Vec2FeatureExtractor
    if wanted.samples is not None:
        wave = np.pad(wave[: wanted.samples], (0, max(0, wanted.samples - len(wave))))
    made: NDArray[Any] = wave.astype(wanted.dtype)
    return made


def _floats(samples: NDArray[Any]) -> NDArray[np.float64]:
    """Samples of -1 to 1; 24 bits are in the upper bytes of 32."""
    if samples.dtype == np.uint8:
        return (samples.astype(np.float64) - 128) / 128
    scale = 1.0 if samples.dtype.kind == "f" else float(-np.iinfo(samples.dtype).min)
    floats: NDArray[np.float64] = samples.astype(np.float64) / scale
    return floats
