"""Inputs of known meaning for the trained networks: files, lines of text, sentences, sounds, a name."""

from __future__ import annotations

import gzip
import io
import json
import os
import wave
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from examples import notes
from examples.trained import Trained
from tests.support.paths import ROOT

PAIRS = [
    ("A man is playing a guitar.", "Someone makes music on a string instrument."),
    ("The stock market fell sharply today.", "Shares lost a lot of value this morning."),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
]


NAME = "\u0639\u0628\u062f \u0627\u0644\u0631\u062d\u0645\u0646"
SPELT = {None: "Abderrahmane", "EG": "Abdel Rahman", "SY": "Abdulrahman"}


def missing(what: str) -> NoReturn:
    """Skip the test because `what` is missing; fail in CI."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


def path_of(network: Trained) -> Path:
    """The path of the network's file."""
    try:
        return network.path()
    except FileNotFoundError as error:
        missing(str(error))


def files() -> dict[str, bytes]:
    """Files of known types, generated here or in the repository."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, text in (("readme.txt", "hello"), ("data.csv", "a,b\n1,2\n")):
            file.writestr(zipfile.ZipInfo(name), text)  # dated 1980: without a date, the bytes would be others in each run
    return {
        "zip": archive.getvalue(),
        "gzip": gzip.compress(b"hello " * 50, mtime=0),
        "python": Path(__file__).read_bytes(),
        "json": json.dumps({"name": "flashmem", "sizes": list(range(40)), "nested": {"a": None, "b": True}}, indent=2).encode(),
        "png": (ROOT / "docs/images/overlap.png").read_bytes(),
        "toml": (ROOT / "pyproject.toml").read_bytes(),
        "shell": b'#!/usr/bin/env bash\nset -eu\nfor f in *.txt; do\n  echo "$f"\ndone\n',
        "sql": b"SELECT name, sum(size) FROM files\nWHERE kind = 'png'\nGROUP BY name ORDER BY 2 DESC;\nDROP TABLE files;\n",
    }


def line(text: str) -> NDArray[np.uint8]:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(28)
    image = Image.new("RGB", (16 + round(font.getlength(text)), 44), (250, 247, 240))
    ImageDraw.Draw(image).text((8, 4), text, font=font, fill=(30, 30, 40))
    return np.asarray(image)


def played(starts: Mapping[int, list[float]], seconds: float = 1.9) -> NDArray[np.float32]:
    """A plucked string for each MIDI number, at each time: five partials that decay."""
    times, samples = np.arange(round(seconds * notes.RATE)) / notes.RATE, np.zeros(round(seconds * notes.RATE))
    for midi, moments in starts.items():
        pitch = 440 * 2 ** ((midi - 69) / 12)
        for moment in moments:
            since = np.maximum(times - moment, 0)
            partials = sum(np.sin(2 * np.pi * pitch * part * since) / part**1.5 for part in range(1, 6))
            samples += 0.3 * partials * np.exp(-4 * since) * np.minimum(1, 200 * since)
    return samples.astype(np.float32)


def write_wave(path: Path, samples: NDArray[np.float32], rate: int) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767 / max(1, np.abs(samples).max())).astype("<i2").tobytes())
    return path
