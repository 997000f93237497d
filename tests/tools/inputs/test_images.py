"""Images as inputs: against numpy by hand, and numbers of transformers' image processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flashmem.base.errors import UserError
from flashmem.tools.inputs.description import describe
from flashmem.tools.inputs.image import read_image
from flashmem.tools.inputs.image_format import ImageFormat, image_format, parsed_flags
from flashmem.tools.inputs.prepare import Given, prepare
from tests.tools.inputs.models import identity, photo, saved_photo

_SHARED = {"do_normalize": True, "do_rescale": True, "do_resize": True, "rescale_factor": 0.00392156862745098}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], **_SHARED}
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711], **_SHARED}
PROCESSORS: dict[str, tuple[dict[str, Any], tuple[int, int], list[float]]] = {
    "ViTImageProcessor": (
        {"resample": 2, "size": {"height": 32, "width": 40}, **_HALF},
        (32, 40),
        [-0.087349, 0.356863, -0.458824, 0.701961, -0.45098, -0.709804, 0.803922],
    ),
    "CLIPImageProcessor": (
        {
            "crop_size": {"height": 32, "width": 32},
            "do_center_crop": True,
            "resample": 3,
            "size": {"shortest_edge": 36},
            **_CLIP,
        },
        (32, 32),
        [0.136599, 1.215013, -0.236313, -1.025178, 1.930336, -0.581491, 2.046357],
    ),
    "ConvNextImageProcessor": (
        {"crop_pct": 0.875, "resample": 2, "size": {"shortest_edge": 28}, **_HALF},
        (28, 28),
        [-0.024907, 0.670588, -0.152941, -0.027451, 0.913725, -0.388235, 0.72549],
    ),
    "DeiTImageProcessor": (
        {
            "crop_size": {"height": 32, "width": 32},
            "do_center_crop": True,
            "resample": 3,
            "size": {"height": 40, "width": 40},
            **_HALF,
        },
        (32, 32),
        [-0.040273, 0.545098, -0.286274, 0.113726, -0.937255, 0.129412, 0.788235],
    ),
    "MobileNetV2ImageProcessor": (
        {
            "crop_size": {"height": 32, "width": 32},
            "do_center_crop": True,
            "resample": 2,
            "size": {"shortest_edge": 40},
            **_HALF,
        },
        (32, 32),
        [-0.018949, 0.686275, -0.137255, -0.05098, 0.764706, -0.741176, 0.32549],
    ),
    "EfficientNetImageProcessor": (
        {
            "crop_size": {"height": 289, "width": 289},
            "do_center_crop": False,
            "resample": 0,
            "rescale_offset": True,
            "size": {"height": 30, "width": 30},
            **_HALF,
            "rescale_factor": 0.00784313725490196,
        },
        (30, 30),
        [-1.164764, -0.223529, -1.870588, 0.607843, -1.933333, -2.498039, 0.607843],
    ),
}
"""Configuration, size, and the mean, the pixel a third down and a quarter across, and the last pixel of the result.

Computed once by transformers 4.57.6 with Pillow: `PROCESSOR(**configuration)(Image.fromarray(photo()), return_tensors="np")`.
"""


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("open_size", [False, True])
def test_a_hugging_face_folder_gives_what_its_processor_gives(kind: str, open_size: bool, tmp_path: Path) -> None:
    config, (height, width), expected = PROCESSORS[kind]
    shape = ["n", 3, "h", "w"] if open_size else [1, 3, height, width]
    model = identity(tmp_path / "m.onnx", {"x": shape}, preprocessor_config={**config, "image_processor_type": kind})
    made = prepare(model, Given(image=saved_photo(tmp_path / "p.png")))
    array = made.arrays["x"]
    assert array.shape == (1, 3, height, width) and array.dtype == np.float32
    found = [array.astype(np.float64).mean(), *array[0, :, height // 3, width // 4], *array[0, :, -1, -1]]
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert "from preprocessor_config.json" in made.sentences["image"]
    assert dict(made.shapes) == ({"x": (1, 3, height, width)} if open_size else {})


def test_the_folder_of_transformers_js_has_its_files_above(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    model = identity(tmp_path / "onnx/model.onnx", {"x": [1, 3, 30, 30]})
    config = (tmp_path / "onnx/model.onnx").parent.parent / "preprocessor_config.json"
    config.write_text('{"size": 30, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.5, 0.25]}')
    array = prepare(model, Given(image=saved_photo(tmp_path / "p.png", 30, 30))).arrays["x"]
    by_hand = (photo(30, 30) / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.5, 0.25]
    np.testing.assert_allclose(array[0], by_hand.transpose(2, 0, 1), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "flags", "picked"),
    [
        ([1, 3, 40, 40], {}, lambda pixels: pixels.transpose(2, 0, 1) / 255),
        ([1, 40, 40, 3], {}, lambda pixels: pixels / 255),
        ([3, 40, 40], {"rescale": "1"}, lambda pixels: pixels.transpose(2, 0, 1)),
        ([1, 40, 40, 3], {"color": "bgr", "rescale": "1", "mean": "104,117,123"}, lambda p: p[..., ::-1] - [104, 117, 123.0]),
        ([1, 3, 40, 40], {"mean": "0.5", "std": "0.25"}, lambda pixels: (pixels.transpose(2, 0, 1) / 255 - 0.5) / 0.25),
        ([1, "c", "h", "w"], {"size": "40", "layout": "nchw"}, lambda pixels: pixels.transpose(2, 0, 1) / 255),
    ],
)
def test_layout_order_and_values_are_what_numpy_makes(
    shape: list[int | str], flags: dict[str, str], picked: Any, tmp_path: Path
) -> None:
    """The photo has the size already, so that only the pixels' order and values change."""
    model = identity(tmp_path / "m.onnx", {"x": shape})
    made = prepare(model, Given(image=saved_photo(tmp_path / "p.png", 40, 40), image_flags=flags))
    array = made.arrays["x"]
    expected = picked(photo(40, 40).astype(np.float64))
    assert array.shape == (expected.shape if len(shape) == 3 else (1, *expected.shape))
    np.testing.assert_allclose(array.reshape(expected.shape), expected, rtol=1e-6, atol=1e-5)
    assert ("guessed: RGB" in made.sentences["image"]) == ("color" not in flags)


def test_bytes_of_a_model_for_uint8_are_the_pixels(tmp_path: Path) -> None:
    from onnx import TensorProto

    model = identity(tmp_path / "m.onnx", {"x": [1, 40, 40, 3]}, dtype=TensorProto.UINT8)
    path = saved_photo(tmp_path / "p.png", 40, 40)
    np.testing.assert_array_equal(prepare(model, Given(image=path)).arrays["x"], photo(40, 40)[None])
    with pytest.raises(UserError, match="holds 0 to 255 only; leave --rescale, --mean and --std out"):
        prepare(model, Given(image=path, image_flags={"mean": "0.5"}))


def test_fits_are_pillow_s(tmp_path: Path) -> None:
    path = saved_photo(tmp_path / "p.png", 90, 60)
    image = Image.fromarray(photo(90, 60))
    cropped = image.resize((60, 40), Image.Resampling.BICUBIC).crop((10, 0, 50, 40))
    padded = Image.new("RGB", (40, 40), (114, 114, 114))
    padded.paste(image.resize((40, 27), Image.Resampling.BICUBIC), (0, 6))
    stretched = image.resize((40, 40), Image.Resampling.BICUBIC)
    for fit, expected in (("crop", cropped), ("pad", padded), ("stretch", stretched)):
        wanted = ImageFormat(40, 40, layout="NHWC", fit=fit, resample="bicubic", rescale=1.0, dtype="uint8")  # type: ignore[arg-type]
        np.testing.assert_array_equal(read_image(path, wanted)[0], np.asarray(expected))


def test_one_channel_is_grey_and_a_turned_photo_is_upright(tmp_path: Path) -> None:
    image = Image.fromarray(photo(40, 30))
    exif = image.getexif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    image.save(tmp_path / "p.png", exif=exif)
    model = identity(tmp_path / "m.onnx", {"x": [1, 1, 40, 30]})
    array = prepare(model, Given(image=tmp_path / "p.png")).arrays["x"]
    upright = np.asarray(image.convert("L").transpose(Image.Transpose.ROTATE_270))
    np.testing.assert_allclose(array[0, 0], upright / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"imgsz": "[40, 48]", "task": "detect"}, {"size": (40, 48), "fit": "pad", "rescale": 1 / 255}),
        ({"imgsz": "[40, 48]", "task": "classify"}, {"size": (40, 48), "fit": "crop", "rescale": 1 / 255}),
        (
            {"Image.BitmapPixelFormat": "Bgr8", "Image.NominalPixelRange": "Normalized_1_1"},
            {"color": "BGR", "mean": (0.5,), "std": (0.5,)},
        ),
        ({"Image.NominalPixelRange": "NominalRange_0_255"}, {"rescale": 1.0}),
    ],
)
def test_metadata_of_the_file_are_read(metadata: dict[str, str], expected: dict[str, Any], tmp_path: Path) -> None:
    open_size = "imgsz" in metadata
    model = identity(tmp_path / "m.onnx", {"x": [1, 3, "h", "w"] if open_size else [1, 3, 40, 48]}, metadata=metadata)
    described = describe(model, {})
    made, words = image_format(described, described.inputs[0], {})
    assert (made.height, made.width) == expected.pop("size", (40, 48))
    assert {name: getattr(made, name) for name in expected} == expected
    assert "the model's metadata" in words


def test_timm_s_configuration_crops_after_its_share(tmp_path: Path) -> None:
    own = {
        "input_size": [3, 40, 40],
        "mean": [0.4, 0.5, 0.6],
        "std": [0.2, 0.2, 0.3],
        "crop_pct": 0.8,
        "interpolation": "bicubic",
    }
    model = identity(tmp_path / "m.onnx", {"x": [1, 3, 40, 40]}, config={"pretrained_cfg": own})
    described = describe(model, {})
    made, words = image_format(described, described.inputs[0], parsed_flags({"std": "1"}))
    assert (made.shorter, made.fit, made.resample, made.mean, made.std) == (50, "crop", "bicubic", (0.4, 0.5, 0.6), (1.0,))
    assert words.endswith("from flags, config.json")


@pytest.mark.parametrize(
    ("shapes", "flags", "message"),
    [
        ({"x": [1, 3, "h", "w"]}, {}, r"the size of images for input 'x' \(1x3x\?x\?\) is not known; give it with --size"),
        ({"x": [1, 4, 40, 40]}, {}, "no input of the model is an image; its inputs are: x float32 1x4x40x40"),
        ({"x": [1, 3, 40, 3]}, {}, "may be NCHW or NHWC; say which with --layout"),
        (
            {"a": [1, 3, 40, 40], "b": [1, 3, 8, 8]},
            {},
            r"the model has 2 inputs for --image \(a, b\); give arrays with --input",
        ),
        ({"x": [1, 3, 40, 40]}, {"layout": "NHWC"}, "no image in NHWC"),
        ({"x": [1, 3, 40, 40]}, {"size": "30"}, "the image would be 1x3x30x30; change --size, --layout or --color"),
        ({"x": [1, 3, 40, 40]}, {"color": "grey"}, "the image would be 1x1x40x40"),
        ({"x": [1, 3, 40, 40]}, {"mean": "1,2"}, r"--mean has 2 values for 3 channel\(s\); give one, or one for each"),
        ({"x": [1, 3, 40, 40]}, {"std": "1,0,1"}, "--std has a 0"),
        ({"x": [1, 3, 40, 40]}, {"std": "many"}, "--std many: give numbers"),
        ({"x": [1, 3, 40, 40]}, {"size": "0x9"}, "--size 0x9: give pixels"),
        ({"x": [1, 3, 40, 40]}, {"fit": "zoom"}, "--fit zoom: name one of crop, stretch, pad"),
        ({"x": [1, 3, 40, 40]}, {"rescale": "1/0"}, "--rescale 1/0: give the factor"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    shapes: dict[str, list[int | str]], flags: dict[str, str], message: str, tmp_path: Path
) -> None:
    model = identity(tmp_path / "m.onnx", shapes)
    with pytest.raises(UserError, match=message):
        prepare(model, Given(image=saved_photo(tmp_path / "p.png"), image_flags=flags))


def test_files_that_are_no_images_are_refused(tmp_path: Path) -> None:
    wanted = ImageFormat(8, 8)
    (tmp_path / "text.png").write_text("not a picture")
    whole = saved_photo(tmp_path / "p.png").read_bytes()
    (tmp_path / "half.png").write_bytes(whole[: len(whole) // 2])
    Image.fromarray(np.full((9, 9), 40_000, np.uint16)).save(tmp_path / "deep.png")
    for name, message in (
        ("text", "is not an image"),
        ("half", "is not an image"),
        ("deep", "more than 8 bits"),
        ("none", "no such"),
    ):
        with pytest.raises(UserError, match=message):
            read_image(tmp_path / f"{name}.png", wanted)


def test_a_processor_with_rules_of_its_own_is_refused(tmp_path: Path) -> None:
    config = {"image_processor_type": "LevitImageProcessor", "size": 40, "image_mean": [0.5], "image_std": [0.5]}
    model = identity(tmp_path / "m.onnx", {"x": [1, 3, 40, 40]}, preprocessor_config=config)
    with pytest.raises(UserError, match="names LevitImageProcessor, whose rules are not in the file"):
        prepare(model, Given(image=saved_photo(tmp_path / "p.png")))
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        prepare(model, Given(image=tmp_path / "p.png"))
