"""From a photo, a sound or a text to a model's inputs: which input it is for, in which form, and the labels of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.base.extras import need
from flashmem.tools.inputs.audio import audio_format, is_waveform, read_audio, time_axis
from flashmem.tools.inputs.classes import Labels, find_labels
from flashmem.tools.inputs.description import TOKENIZER, Description, ModelInput, describe
from flashmem.tools.inputs.image import read_image
from flashmem.tools.inputs.image_format import image_format, is_image, parsed_flags
from flashmem.tools.inputs.text import is_text, read_text

_NEEDED = ("--image", "--audio", "--text"), ("PIL", "scipy", "tokenizers")
NONE: Mapping[str, Sequence[int]] = MappingProxyType({})


@dataclass(frozen=True)
class Given:
    """What the user gave: files, a text, labels, and flags of an image's format as text."""

    image: Path | None = None
    audio: Path | None = None
    text: str | None = None
    labels: Path | None = None
    rate: int | None = None
    image_flags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PreparedInputs:
    """Arrays by input, a sentence for each kind of file, inputs of the model that are still to be given, and labels.

    `shapes`: those of arrays whose inputs have open dimensions.
    """

    arrays: Mapping[str, NDArray[Any]]
    shapes: Mapping[str, tuple[int, ...]]
    sentences: Mapping[str, str]
    others: tuple[str, ...]
    labels: Labels


def prepare(model: Path, given: Given, shapes: Mapping[str, Sequence[int]] = NONE) -> PreparedInputs:
    """Make the inputs of `model`, an ONNX file or a bundle of one. `shapes`: sizes of open dimensions, by input.

    Raises:
        UserError: an input cannot be made of what was given; the sentence says why, and what to give.
    """
    for value, flag, module in zip((given.image, given.audio, given.text), *_NEEDED, strict=True):
        if value is not None:
            need(flag, module)
    described = describe(model, shapes)
    arrays: dict[str, NDArray[Any]] = {}
    sentences = {}
    if given.image is not None:
        port = _the_one(described, is_image, "image", "--image")
        wanted, words = image_format(described, port, parsed_flags(given.image_flags))
        arrays[port.name] = read_image(given.image, wanted)
        sentences["image"] = f"{given.image.name} as {port.name}: {words}"
    elif given.image_flags:
        raise UserError(f"--{next(iter(given.image_flags))} says how an image is read; give one with --image")
    if given.audio is not None:
        port = _the_one(described, is_waveform, "waveform", "--audio")
        form, words = audio_format(described, port, given.rate)
        samples = read_audio(given.audio, form)
        axis = time_axis(port.shape)
        arrays[port.name] = samples.reshape(tuple(len(samples) if index == axis else 1 for index in range(len(port.shape))))
        sentences["audio"] = f"{given.audio.name} as {port.name}: {len(samples)} samples at {words}"
    elif given.rate is not None:
        raise UserError("--rate says how audio is read; give a file with --audio")
    if given.text is not None:
        made, sentences["text"] = _text(described, model, given.text)
        arrays |= made
    opened = {port.name: arrays[port.name].shape for port in described.inputs if port.name in arrays and None in port.shape}
    others = tuple(port.name for port in described.inputs if port.name not in arrays)
    return PreparedInputs(arrays, opened, sentences, others, find_labels(described, given.labels))


def _the_one(model: Description, fits: Callable[[ModelInput], bool], what: str, flag: str) -> ModelInput:
    """The only input that fits."""
    ports = [port for port in model.inputs if fits(port)]
    if len(ports) == 1:
        return ports[0]
    if ports:
        names = ", ".join(port.name for port in ports)
        raise UserError(f"the model has {len(ports)} inputs for {flag} ({names}); give arrays with --input")
    own = ", ".join(f"{port.name} {port.dtype} {port.shape_text}" for port in model.inputs) or "none"
    why = " (spectrograms and other features are not computed here)" if flag == "--audio" else ""
    raise UserError(f"no input of the model is {'an' if what[0] in 'aeiou' else 'a'} {what}{why}; its inputs are: {own}")


def _text(model: Description, path: Path, text: str) -> tuple[dict[str, NDArray[Any]], str]:
    ports = [port for port in model.inputs if is_text(port)]
    if "input_ids" not in [port.name for port in ports]:
        own = ", ".join(f"{port.name} {port.dtype} {port.shape_text}" for port in model.inputs) or "none"
        raise UserError(f"no input of the model is named input_ids, so --text has no place; its inputs are: {own}")
    tokenizer = model.find(TOKENIZER)
    if tokenizer is None:
        raise UserError(f"there is no {TOKENIZER} beside {path}; copy the model's there, or give tokens with --input")
    arrays, tokens = read_text(text, tokenizer, ports)
    length = arrays["input_ids"].shape[1]
    cut = f", of {tokens}" if tokens > length else f", {length - tokens} of them padding" if tokens < length else ""
    return arrays, f"{', '.join(arrays)}: {length} tokens{cut}; {TOKENIZER}"
