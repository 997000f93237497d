"""Boxes that NonMaxSuppression selects among boxes whose number depends on data, as detectors of torchvision do."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

from flashmem.base.errors import UnsupportedModelError
from flashmem.compiler.frontend.importer import import_model

FILTERED = """
<ir_version: 10, opset_import: ["" : 17]>
detect (float[6, 4] boxes, float[6] scores) => (float[n, 4] found, float[n] certainty, int64[2] size)
<float least = {0.05}, int64[1] open = {-1}, int64[1] zero = {0}, int64[2] ends = {0, 1}, int64[1] two = {2},
 int64[1] three = {3}, int64[1] one = {1}, int64[1] most = {4}, float[1] overlap = {0.5}>
{
    sure = Greater (scores, least)
    places = NonZero (sure)
    flat = Reshape (places, open)
    likely = Gather (boxes, flat)
    weights = Gather (scores, flat)
    image = Unsqueeze (likely, zero)
    classes = Unsqueeze (weights, ends)
    selected = NonMaxSuppression (image, classes, most, overlap)
    size = Shape (selected)
    column = Slice (selected, two, three, one)
    row = Squeeze (column, one)
    found = Gather (likely, row)
    certainty = Gather (weights, row)
}
"""


def test_a_number_of_boxes_that_depends_on_data_is_refused_for_that(tmp_path: Path) -> None:
    onnx.save(parser.parse_model(FILTERED), tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError) as caught:
        import_model(tmp_path / "m.onnx")
    assert str(caught.value) == (
        "the model has 1 node that flashmem cannot run: NonZero is not supported: the shape of its output depends on data; "
        "keep all elements and mask them with Where, or end the model before it (NonZero_places)"
    )
