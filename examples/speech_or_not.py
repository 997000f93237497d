"""When is there speech? Silero VAD (MIT): a short-time Fourier transform, convolutions and an LSTM.

python -m examples.speech_or_not RECORDING.wav...
"""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from examples.trained import Run, Trained, command, runner
from flashmem.base.errors import UserError
from flashmem.base.streams import exit_codes

RATE, FRAME = 16000, 512  # samples in a second; in a frame, of 32 ms
_BEFORE = 64  # samples of the frame before that the network sees again
_FRAMES = 32  # frames in one run, about a second
_STATE = (1, 1, 128)
NETWORK = Trained(
    "silero_vad",
    "data/silero_vad_16k_sequence.onnx",
    {"input": (_FRAMES, _BEFORE + FRAME), "h": _STATE, "c": _STATE},
    "3MB",
)


def read_wave(path: Path, rate: int = RATE) -> NDArray[np.float32]:
    """The samples of a WAV file of 16 bits, its first channel only, from -1 to 1 and `rate` of them a second.

    Raises:
        UserError: not such a file.
    """
    try:
        with wave.open(str(path)) as file:
            if file.getsampwidth() != 2:
                raise UserError(f"{path} has {8 * file.getsampwidth()} bits a sample; give a WAV file of 16")
            channels, recorded = file.getnchannels(), file.getframerate()
            samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")[::channels] / np.float32(32768)
    except (wave.Error, EOFError) as error:
        raise UserError(f"{path} is not a WAV file that can be read ({error}); give one of 16 bits a sample") from error
    times = np.arange(int(len(samples) * rate / recorded)) * (recorded / rate)
    return np.asarray(np.interp(times, np.arange(len(samples)), samples), np.float32)


def speech(samples: NDArray[np.float32], run: Run) -> NDArray[np.float32]:
    """The probability of speech in each frame; silence completes the last one."""
    count = -(-len(samples) // FRAME)
    runs = max(1, -(-count // _FRAMES))
    frames = np.zeros((runs * _FRAMES, FRAME), np.float32)
    frames.ravel()[: len(samples)] = samples
    before = np.vstack([np.zeros((1, _BEFORE), np.float32), frames[:-1, -_BEFORE:]])
    seen, h, c = np.hstack([before, frames]), np.zeros(_STATE, np.float32), np.zeros(_STATE, np.float32)
    found = []
    for block in np.split(seen, runs):
        probabilities, h, c = run({"input": block, "h": h, "c": c})
        found.append(probabilities)
    return np.concatenate(found)[:count]


def spans(probabilities: NDArray[np.float32]) -> list[tuple[float, float]]:
    """Start and end of each part with speech, in seconds."""
    edges = np.flatnonzero(np.diff(np.pad(probabilities > 0.5, 1).astype(np.int8)))
    return [(start * FRAME / RATE, end * FRAME / RATE) for start, end in edges.reshape(-1, 2).tolist()]


if __name__ == "__main__":
    with exit_codes():
        files = command(__doc__, files="RECORDING.wav").parse_args().files
        with NETWORK.open() as session:
            for name in files:
                found = spans(speech(read_wave(name), runner(session)))
                print(f"{name}: {', '.join(f'{start:.1f} to {end:.1f} s' for start, end in found) or 'no speech'}")
