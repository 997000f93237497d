"""Which notes are played? Basic Pitch (Spotify, Apache-2.0): a constant-Q transform made of convolutions, then a small network.

python -m examples.notes RECORDING.wav...
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from examples.speech_or_not import read_wave
from examples.trained import Run, Trained, command, runner
from flashmem.base.streams import exit_codes

RATE = 22050
SAMPLES = 43844  # in one run: two seconds less a step of the network
FRAME = 256  # samples in a frame of the output
_LOWEST = 21  # MIDI number of the first of 88 keys
_INPUT = "serving_default_input_2:0"
_PLAYED, _ONSET = 1, 0  # of the outputs; the third follows the pitch between the keys
_SURE = 0.7  # that a key was struck; the package takes 0.5, above which strings that still ring are struck again by the next
NETWORK = Trained("basic_pitch", "saved_models/icassp_2022/nmp.onnx", {_INPUT: (1, SAMPLES, 1)}, "16MB")


def keys(samples: NDArray[np.float32], run: Run) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The probability that a key of a piano sounds, and that it was just struck, by frame and key; of the first two seconds."""
    block = np.zeros((1, SAMPLES, 1), np.float32)
    block[0, : len(samples[:SAMPLES]), 0] = samples[:SAMPLES]
    outputs = run({_INPUT: block})
    return outputs[_PLAYED][0], outputs[_ONSET][0]


def notes(samples: NDArray[np.float32], run: Run) -> list[tuple[float, str]]:
    """When each note is struck, in seconds, and its name: C4 is the middle of the keyboard."""
    played, struck = keys(samples, run)
    louder = np.pad(struck, ((1, 1), (0, 0)))
    peaks = (struck > _SURE) & (struck >= louder[:-2]) & (struck > louder[2:]) & (played > 0.3)
    return [(frame * FRAME / RATE, name(_LOWEST + key)) for frame, key in np.argwhere(peaks).tolist()]


def name(midi: int) -> str:
    """The name of a note by its MIDI number."""
    return f"{('C', 'C#', 'D', 'D#', 'E', 'F', 'F#', 'G', 'G#', 'A', 'A#', 'B')[midi % 12]}{midi // 12 - 1}"


if __name__ == "__main__":
    with exit_codes():
        files = command(__doc__, files="RECORDING.wav").parse_args().files
        with NETWORK.open() as session:
            for file in files:
                found = notes(read_wave(file, RATE), runner(session))
                print(f"{file}: {', '.join(f'{note} at {start:.2f} s' for start, note in found) or 'no notes'}")
