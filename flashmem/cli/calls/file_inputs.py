"""Options of `flashmem run` that make inputs of a photo, a sound or a text."""

from __future__ import annotations

from pathlib import Path

from flashmem.request.description import OptionSet, option
from flashmem.request.kinds import File, Kind, Numeric

_GROUP = "Inputs from files"


class ImageOptions(OptionSet):
    """How a photo becomes an input; each option left out is the model's."""

    size: str | None = option("The image's size.", default=None, kind=Kind("WxH"), shown="the model's", group=_GROUP)
    layout: str | None = option("Where an image's channels are.", default=None, kind=Kind("NCHW|NHWC"), group=_GROUP)
    color: str | None = option("The order of an image's channels.", default=None, kind=Kind("RGB|BGR|grey"), group=_GROUP)
    fit: str | None = option(
        "How a photo of other proportions gets the image's size.", default=None, kind=Kind("crop|stretch|pad"), group=_GROUP
    )
    rescale: str | None = option("Factor for an image's values of 0 to 255.", default=None, kind=Kind("1/255"), group=_GROUP)
    mean: str | None = option("What is subtracted from values, by channel.", default=None, kind=Kind("M,M,M"), group=_GROUP)
    std: str | None = option("What values are then divided by, by channel.", default=None, kind=Kind("S,S,S"), group=_GROUP)


class FileInputs(ImageOptions):
    """Files or a text that become inputs, and how."""

    image: Path | None = option(
        "A photo as input (needs the inputs extra).", default=None, kind=File("photo.jpg"), group=_GROUP
    )
    audio: Path | None = option("A WAV file as input, as a waveform.", default=None, kind=File("sound.wav"), group=_GROUP)
    text: str | None = option("A text as input, by the tokenizer.json beside.", default=None, kind=Kind(), group=_GROUP)
    labels: Path | None = option(
        "Names of classes, one a line.", default=None, kind=File("labels.txt"), shown="the model's", group=_GROUP
    )
    rate: int | None = option(
        "Samples per second of --audio.", default=None, kind=Numeric("HZ", least=1, most=10**6), group=_GROUP
    )
