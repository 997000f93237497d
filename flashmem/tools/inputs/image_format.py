"""How a model wants its images: from flags, a Hugging Face folder, ONNX metadata, and the shape of its input.

Sources, the first that has a property decides it: flags; `preprocessor_config.json` (transformers' image processors);
`pretrained_cfg` in `config.json` (timm); metadata properties of Ultralytics (`imgsz`, `task`) and of the ONNX specification
(docs/MetadataProps.md: `Image.BitmapPixelFormat`, `Image.NominalPixelRange`); the input's shape and type; a default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flashmem.base.errors import UserError
from flashmem.tools.inputs.description import CONFIG, PREPROCESSOR, Description, ModelInput

Layout = Literal["NCHW", "NHWC"]
Color = Literal["RGB", "BGR", "grey"]
Fit = Literal["crop", "stretch", "pad"]
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Pillow's resampling filters by number."""

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class ImageFormat:
    """An image as a model's input. `read_image` makes an array of it.

    A photo becomes `height` x `width` pixels. "crop" resizes its shorter side to `shorter`, or all of it to `before_crop`
    (height and width), and cuts the centre out; "stretch" ignores its proportions; "pad" fits all of it in, and fills the rest
    with grey 114. `color` is the order of channels. A value v of 0 to 255 becomes (v * rescale - mean) / std, with one mean and
    one std for each channel, or one for all.
    """

    height: int
    width: int
    layout: Layout = "NCHW"
    color: Color = "RGB"
    fit: Fit = "crop"
    shorter: int | None = None
    before_crop: tuple[int, int] | None = None
    resample: str = "bilinear"
    rescale: float = 1 / 255
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    dtype: str = "float32"
    batch: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        channels = 1 if self.color == "grey" else 3
        one = (channels, self.height, self.width) if self.layout == "NCHW" else (self.height, self.width, channels)
        return (1, *one) if self.batch else one


def image_format(model: Description, port: ModelInput, flags: Fields) -> tuple[ImageFormat, str]:
    """The format of images for `port`, and a sentence that says it and what was guessed.

    `flags` has fields of `ImageFormat` that the user gave, with `size` for height and width.

    Raises:
        UserError: the size is unknown, sources contradict the shape, or a configuration has a rule that is not supported.
    """
    layout, color = _layout(port, flags.get("layout"))
    fixed = _shape_fields(port, layout, color)
    sources: list[tuple[str, Fields]] = [
        ("flags", flags),
        (PREPROCESSOR, _preprocessor(model.config(PREPROCESSOR))),
        (CONFIG, _timm(model.config(CONFIG))),
        ("the model's metadata", {**_ultralytics(model), **_onnx_metadata(model)}),
        ("the input's shape", fixed),
    ]
    found: dict[str, Any] = {}
    used: list[str] = []
    for name, fields in sources:
        new = {key: value for key, value in fields.items() if value is not None and key not in found}
        found |= new
        if new and name not in used:
            used.append(name)
    if "size" not in found:
        raise UserError(f"the size of images for input {port.name!r} ({port.shape_text}) is not known; give it with --size")
    guessed = _GUESSES if port.dtype != "uint8" else {**_GUESSES, "rescale": (1.0, "values of 0 to 255")}
    words = [text for key, (_, text) in guessed.items() if key not in found]
    found = {key: value for key, (value, _) in guessed.items()} | found
    height, width = found.pop("size")
    known = {key: value for key, value in found.items() if key in ImageFormat.__dataclass_fields__}
    made = ImageFormat(height, width, **{**known, "layout": layout, "dtype": port.dtype, "batch": len(port.shape) == 4})
    _check(made, port)
    return made, f"{_words(made)}; from {', '.join(used)}{'; guessed: ' + ', '.join(words) if words else ''}"


_GUESSES: dict[str, tuple[Any, str]] = {
    "color": ("RGB", "RGB"),
    "fit": ("crop", "centre crop"),
    "resample": ("bilinear", "bilinear"),
    "rescale": (1 / 255, "values of 0 to 1"),
    "mean": ((0.0,), "mean 0"),
    "std": ((1.0,), "std 1"),
}
"""What is assumed where no source says it, and its words."""


def is_image(port: ModelInput) -> bool:
    """Whether an input may be an image: three or four dimensions, of which one may be channels."""
    return port.dtype in ("float32", "float16", "float64", "uint8") and bool(_layouts(port))


def _layouts(port: ModelInput) -> list[Layout]:
    """The layouts that the shape permits: one image, and one or three channels or an open number."""
    shape = port.shape[1:] if len(port.shape) == 4 else port.shape
    if len(shape) != 3 or (len(port.shape) == 4 and port.shape[0] not in (1, None)):
        return []
    fits: dict[Layout, int | None] = {"NCHW": shape[0], "NHWC": shape[2]}
    certain = [layout for layout, channels in fits.items() if channels in (1, 3)]
    if certain:
        return certain if None not in shape or len(certain) > 1 else certain[:1]
    return [layout for layout, channels in fits.items() if channels is None and shape[1] is None]


def _layout(port: ModelInput, asked: str | None) -> tuple[Layout, Color | None]:
    """The layout, and grey for one channel (None for three)."""
    layouts = _layouts(port)
    if asked is not None:
        layouts = [layout for layout in layouts if layout == asked]
    if not layouts:
        hint = "no image of one or three channels" if asked is None else f"no image in {asked}"
        raise UserError(f"input {port.name!r} has the shape {port.shape_text}, which is {hint}; give the array with --input")
    if len(layouts) > 1:
        raise UserError(f"input {port.name!r} ({port.shape_text}) may be NCHW or NHWC; say which with --layout")
    shape = port.shape[-3:]
    channels = shape[0] if layouts[0] == "NCHW" else shape[2]
    return layouts[0], "grey" if channels == 1 else None


def _shape_fields(port: ModelInput, layout: Layout, color: Color | None) -> Fields:
    shape = port.shape[-3:]
    size = shape[1:] if layout == "NCHW" else shape[:2]
    return {"size": size if None not in size else None, "color": color}


def _check(made: ImageFormat, port: ModelInput) -> None:
    """Raise UserError if the format is not that of the input."""
    if any(own is not None and own != given for own, given in zip(port.shape, made.shape, strict=True)):
        given = "x".join(map(str, made.shape))
        raise UserError(
            f"input {port.name!r} has the shape {port.shape_text}, and the image would be {given}; "
            "change --size, --layout or --color"
        )
    channels = made.shape[-3] if made.layout == "NCHW" else made.shape[-1]
    for flag, values in (("--mean", made.mean), ("--std", made.std)):
        if len(values) not in (1, channels):
            raise UserError(f"{flag} has {len(values)} values for {channels} channel(s); give one, or one for each")
    if 0 in made.std:
        raise UserError("--std has a 0, and values are divided by it; give the deviations of the training data")
    if made.dtype == "uint8" and (made.rescale, set(made.mean), set(made.std)) != (1.0, {0.0}, {1.0}):
        raise UserError(f"input {port.name!r} is uint8 and holds 0 to 255 only; leave --rescale, --mean and --std out")


def _words(made: ImageFormat) -> str:
    size = f"{made.width}x{made.height}"
    filtered = "" if made.resample == "bilinear" else f" ({made.resample})"
    before = f"shorter side to {made.shorter or min(made.height, made.width)}"
    if made.before_crop is not None:
        before = "stretched to {1}x{0}".format(*made.before_crop)
    fit = {
        "crop": f"{before}{filtered}, centre {size}",
        "stretch": f"stretched to {size}{filtered}",
        "pad": f"padded to {size}{filtered}",
    }[made.fit]
    values = "v" if made.rescale == 1 else f"v/{1 / made.rescale:.6g}"
    mean, std = (" ".join(f"{value:.4g}" for value in each) for each in (made.mean, made.std))
    if set(made.mean) != {0.0} or set(made.std) != {1.0}:
        values = f"({values} - {mean}) / {std}" if set(made.mean) != {0.0} else f"{values} / {std}"
    return f"{made.layout} {made.color}, {fit}, {values}"


# Sources


_OWN_RESIZE = ("Levit", "PoolFormer", "Perceiver", "GLPN", "Mask2Former", "Pix2Struct", "Nougat", "Donut", "ImageGPT")
"""Image processors whose rules for sizes or values are not in their configuration."""


def _preprocessor(config: Fields) -> Fields:
    """Fields of transformers' `preprocessor_config.json`, `{}` for one of audio."""
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")
    if any(kind.startswith(name) for name in _OWN_RESIZE):
        raise UserError(f"{PREPROCESSOR} names {kind}, whose rules are not in the file; give the array with --input")
    if "size" not in config and "image_mean" not in config:
        return {}
    size = config.get("size")
    crop = config.get("crop_size")
    cropped = bool(config.get("do_center_crop", crop is not None)) and crop is not None
    fields: dict[str, Any] = {"color": None}
    height, width, shorter = _sides(size, square=not cropped)
    if config.get("do_resize", True) and shorter is not None:
        target = _sides(crop, square=True)[:2] if cropped else (shorter, shorter)
        if not cropped and (ratio := config.get("crop_pct")) and shorter < 384:  # ConvNeXT's rule
            fields |= {"fit": "crop", "size": target, "shorter": int(shorter / ratio)}
        elif not cropped and ratio:
            fields |= {"fit": "stretch", "size": target}
        elif cropped:
            fields |= {"fit": "crop", "size": target, "shorter": shorter}
    elif config.get("do_resize", True) and height is not None and not cropped:
        fields |= {"fit": "stretch", "size": (height, width)}
    elif config.get("do_resize", True) and cropped and height is not None:
        fields |= {"fit": "crop", "size": _sides(crop, square=True)[:2], "before_crop": (height, width)}
    if isinstance(config.get("resample"), int) and 0 <= config["resample"] < len(FILTERS):
        fields["resample"] = FILTERS[config["resample"]]
    factor = float(config.get("rescale_factor", 1 / 255))
    fields["rescale"] = factor if config.get("do_rescale", True) else 1.0
    plain = not config.get("do_normalize", "image_mean" in config)
    mean, std = ((0.0,), (1.0,)) if plain else (_numbers(config, "image_mean"), _numbers(config, "image_std"))
    if config.get("rescale_offset"):  # EfficientNet: v * factor - 1, then the mean
        mean = tuple(value + 1 for value in mean)
    return {**fields, "mean": mean, "std": std}


def _sides(size: Any, *, square: bool) -> tuple[int | None, int | None, int | None]:
    """Height, width and the shorter side in a size of transformers; a bare number is a square, or else the shorter side."""
    if isinstance(size, int):
        return (size, size, None) if square else (None, None, size)
    if isinstance(size, Mapping) and {"height", "width"} <= set(size):
        return int(size["height"]), int(size["width"]), None
    if isinstance(size, Mapping) and set(size) == {"shortest_edge"}:
        return None, None, int(size["shortest_edge"])
    return None, None, None  # a longest edge: the size depends on the photo


def _numbers(config: Fields, name: str) -> tuple[float, ...]:
    values = config.get(name)
    if isinstance(values, (int, float)):
        return (float(values),)
    if not isinstance(values, list) or not all(isinstance(value, (int, float)) for value in values):
        raise UserError(f"{PREPROCESSOR} has no list of numbers {name}; repair it, or move it away and use flags")
    return tuple(map(float, values))


def _timm(config: Fields) -> Fields:
    """Fields of `pretrained_cfg` in timm's `config.json`."""
    given = config.get("pretrained_cfg")
    if not isinstance(given, Mapping) or not {"input_size", "mean", "std"} <= set(given):
        return {}
    height, width = given["input_size"][1:]
    ratio = float(given.get("crop_pct") or 1.0)
    mode = given.get("crop_mode", "center")
    if mode not in ("center", "squash") or (mode == "squash" and ratio != 1):
        raise UserError(f"{CONFIG} has timm's crop mode {mode!r}, which is not supported; give the array with --input")
    return {
        "size": (height, width),
        "fit": "crop" if mode == "center" else "stretch",
        "shorter": math.floor(min(height, width) / ratio) if mode == "center" else None,
        "resample": given.get("interpolation", "bilinear"),
        "color": "RGB" if given["input_size"][0] == 3 else None,
        "rescale": 1 / 255,
        "mean": tuple(given["mean"]),
        "std": tuple(given["std"]),
    }


def _ultralytics(model: Description) -> Fields:
    """Fields of Ultralytics' metadata: classifiers crop, others pad; values of 0 to 1."""
    size = model.value("imgsz")
    if not (isinstance(size, list) and len(size) == 2 and "task" in model.properties):
        return {}
    fit = "crop" if model.properties["task"] == "classify" else "pad"
    same = {"color": "RGB", "resample": "bilinear", "rescale": 1 / 255, "mean": (0.0,), "std": (1.0,)}
    return {"size": tuple(size), "fit": fit, **same}


def _onnx_metadata(model: Description) -> Fields:
    """Fields of the properties that the ONNX specification names."""
    fields: dict[str, Any] = {}
    pixels = model.properties.get("Image.BitmapPixelFormat", "").lower()
    for prefix, color in (("gray", "grey"), ("rgb", "RGB"), ("bgr", "BGR")):
        if pixels.startswith(prefix):
            fields["color"] = color
    values = model.properties.get("Image.NominalPixelRange")
    if values in _RANGES:
        fields |= dict(zip(("rescale", "mean", "std"), _RANGES[values], strict=True))
    elif values is not None:
        raise UserError(f"the model's metadata has the pixel range {values}, which is not supported; use --input")
    return fields


_RANGES: dict[str, tuple[float, tuple[float, ...], tuple[float, ...]]] = {
    "NominalRange_0_255": (1.0, (0.0,), (1.0,)),
    "Normalized_0_1": (1 / 255, (0.0,), (1.0,)),
    "Normalized_1_1": (1 / 255, (0.5,), (0.5,)),
}


def parsed_flags(given: Mapping[str, str]) -> dict[str, Any]:
    """The fields in the texts of `--size`, `--layout`, `--color`, `--fit`, `--rescale`, `--mean` and `--std`.

    Raises:
        UserError: a text is not what its flag takes.
    """
    return {name: _READERS[name](text) for name, text in given.items()}


def _one_of(flag: str, *words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        for word in words:
            if text.lower() == word.lower():
                return word
        raise UserError(f"{flag} {text}: name one of {', '.join(words)}")

    return read


def _size(text: str) -> tuple[int, int]:
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and 0 < int(side) <= 1 << 16 for side in sides):
        raise UserError(f"--size {text}: give pixels, 224 or WIDTHxHEIGHT as 320x240")
    width, height = (int(side) for side in (sides[0], sides[-1]))
    return height, width


def _list(flag: str) -> Callable[[str], tuple[float, ...]]:
    def read(text: str) -> tuple[float, ...]:
        try:
            values = tuple(map(float, text.split(",")))
        except ValueError:
            values = (math.nan,)
        if not all(map(math.isfinite, values)):
            raise UserError(f"{flag} {text}: give numbers, for instance 0.485,0.456,0.406")
        return values

    return read


def _factor(text: str) -> float:
    above, _, below = text.partition("/")
    try:
        value = float(above) / float(below or "1")
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise UserError(f"--rescale {text}: give the factor for values of 0 to 255, for instance 1 or 1/255")
    return value


_READERS: dict[str, Callable[[str], Any]] = {
    "size": _size,
    "layout": _one_of("--layout", "NCHW", "NHWC"),
    "color": _one_of("--color", "RGB", "BGR", "grey"),
    "fit": _one_of("--fit", "crop", "stretch", "pad"),
    "rescale": _factor,
    "mean": _list("--mean"),
    "std": _list("--std"),
}
FLAGS = tuple(_READERS)
