"""Images as arrays: decoded, fitted and normalised. `read_image` needs the `inputs` extra (Pillow)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import MissingFileError, UserError
from flashmem.base.extras import need
from flashmem.tools.inputs.image_format import FILTERS, ImageFormat

if TYPE_CHECKING:
    from PIL.Image import Image

_PADDING = 114  # Ultralytics' grey


def read_image(path: str | Path, wanted: ImageFormat) -> NDArray[Any]:
    """The image in a file as an array of `wanted.shape` and `wanted.dtype`.

    Pixels are turned as the file's orientation says, and transparency is dropped, as transformers' `load_image` does.

    Raises:
        MissingFileError: no such file.
        UserError: not an image that Pillow reads, one of more than 8 bits a value, or Pillow is missing.
    """
    need("an image", "PIL")
    import PIL.Image
    import PIL.ImageOps

    path = Path(path)
    if not path.is_file():
        raise MissingFileError(f"{path}: no such image")
    try:
        with PIL.Image.open(path) as opened:
            if opened.mode.startswith(("I", "F")):
                raise UserError(f"{path} has more than 8 bits for a value ({opened.mode}); convert it to 8 bits")
            image = PIL.ImageOps.exif_transpose(opened).convert("L" if wanted.color == "grey" else "RGB")
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise any exception
        raise UserError(f"{path} is not an image that can be read ({' '.join(str(error).split())[:200]})") from error
    pixels = np.asarray(_fit(image, wanted)).reshape(wanted.height, wanted.width, -1)
    if wanted.color == "BGR":
        pixels = pixels[:, :, ::-1]
    values = pixels.astype(np.float32)
    if wanted.dtype != "uint8":
        mean, std = (np.array(each, np.float32) for each in (wanted.mean, wanted.std))
        values = (values * np.float32(wanted.rescale) - mean) / std
    if wanted.layout == "NCHW":
        values = values.transpose(2, 0, 1)
    return np.ascontiguousarray(values.astype(wanted.dtype)).reshape(wanted.shape)


def _fit(image: Image, wanted: ImageFormat) -> Image:
    """The image in the size that is wanted."""
    import PIL.Image

    chosen, (width, height) = PIL.Image.Resampling(FILTERS.index(wanted.resample)), image.size
    if wanted.fit == "stretch":
        return image.resize((wanted.width, wanted.height), chosen)
    if wanted.fit == "pad":
        scale = min(wanted.width / width, wanted.height / height)
        inner = image.resize((max(1, round(width * scale)), max(1, round(height * scale))), chosen)
        result = PIL.Image.new(image.mode, (wanted.width, wanted.height), (_PADDING,) * len(image.getbands()))
        result.paste(inner, ((wanted.width - inner.width) // 2, (wanted.height - inner.height) // 2))
        return result
    shorter = wanted.shorter or min(wanted.width, wanted.height)
    if wanted.before_crop is not None:
        height, width = wanted.before_crop
    elif width <= height:
        height = int(shorter * height / width)
        width = shorter
    else:
        width = int(shorter * width / height)
        height = shorter
    resized = image.resize((width, height), chosen)
    left = (width - wanted.width) // 2
    top = (height - wanted.height) // 2
    return resized.crop((left, top, left + wanted.width, top + wanted.height))  # beyond its edges: black
