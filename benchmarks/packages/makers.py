"""Make one file from another by a quantiser, converter or optimiser.

    PYTHON -m benchmarks.packages.makers NAME FILE MAKER OUTPUT
    PYTHON -m benchmarks.packages.makers versions

PYTHON is of an environment with onnxruntime, onnxsim, onnxslim, onnxoptimizer and onnxconverter-common; flashmem is not needed
there. NAME is the original's in files.toml, which says how inputs for a calibration are drawn. Weights and activations in 8
bits are unsigned, or signed in 7 bits: with signed weights in 8 bits, a processor without VNNI saturates sums, and ONNX
Runtime's own answers are wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx

from benchmarks.packages.files import Shipped, shipped

CALIBRATION_INPUTS = 4


def simplified(original: Shipped, source: Path, target: Path) -> None:
    """onnxsim."""
    import onnxsim

    result, equal = onnxsim.simplify(onnx.load(source))
    assert equal
    onnx.save(result, target)


def slimmed(original: Shipped, source: Path, target: Path) -> None:
    """onnxslim."""
    import onnxslim

    onnx.save(onnxslim.slim(onnx.load(source)), target)


def optimized(original: Shipped, source: Path, target: Path) -> None:
    """onnxoptimizer, with its default passes."""
    import onnxoptimizer

    onnx.save(onnxoptimizer.optimize(onnx.load(source)), target)


def opset_21(original: Shipped, source: Path, target: Path) -> None:
    """The version converter of the onnx package."""
    from onnx import version_converter

    onnx.save(version_converter.convert_version(onnx.load(source), 21), target)


def float16(original: Shipped, source: Path, target: Path) -> None:
    """onnxconverter-common: weights and activations in half, inputs and outputs in float32."""
    from onnxconverter_common import float16 as converter

    onnx.save(converter.convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


def dynamic_int8(original: Shipped, source: Path, target: Path) -> None:
    """ONNX Runtime's quantize_dynamic."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(source, target, weight_type=QuantType.QUInt8)


def static_int8(original: Shipped, source: Path, target: Path) -> None:
    """ONNX Runtime's quantize_static, between QuantizeLinear and DequantizeLinear."""
    _calibrated(original, source, target)


def static_int8_channels(original: Shipped, source: Path, target: Path) -> None:
    """The same with a scale for each channel, and weights in 7 bits."""
    _calibrated(original, source, target, per_channel=True, reduce_range=True, weight_type="QInt8")


def static_qlinear(original: Shipped, source: Path, target: Path) -> None:
    """ONNX Runtime's quantize_static, in quantised operators."""
    _calibrated(original, source, target, quant_format="QOperator")


def _calibrated(
    original: Shipped, source: Path, target: Path, *, quant_format: str = "QDQ", weight_type: str = "QUInt8", **options: Any
) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    ports = {port.name: port for port in _session(source).get_inputs()}

    class Calibration(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seeds = iter(range(100, 100 + CALIBRATION_INPUTS))

        def get_next(self) -> dict[str, Any] | None:
            seed = next(self.seeds, None)
            if seed is None:
                return None
            return {name: drawn.draw(numpy_name(ports[name].type), seed) for name, drawn in original.inputs.items()}

    quantize_static(
        source, target, Calibration(), quant_format=QuantFormat[quant_format], activation_type=QuantType.QUInt8,
        weight_type=QuantType[weight_type], **options,
    )  # fmt: skip


def numpy_name(port_type: str) -> str:
    """The numpy name of ONNX Runtime's `tensor(float)`."""
    name = port_type.removeprefix("tensor(").removesuffix(")")
    return {"float": "float32", "double": "float64"}.get(name, name)


def blocks_int4(original: Shipped, source: Path, target: Path) -> None:
    """ONNX Runtime's quantiser of matrices in blocks of 32: MatMulNBits with 4 bits."""
    _in_blocks(source, target, 4)


def blocks_int8(original: Shipped, source: Path, target: Path) -> None:
    """The same with 8 bits."""
    _in_blocks(source, target, 8)


def _in_blocks(source: Path, target: Path, bits: int) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(source), bits=bits, block_size=32, is_symmetric=False)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target))


def transformer_optimized(original: Shipped, source: Path, target: Path) -> None:
    """ONNX Runtime's optimiser of transformers, for the BERT family."""
    from onnxruntime.transformers.optimizer import optimize_model

    optimize_model(str(source), model_type="bert").save_model_to_file(str(target))


def ort_basic(original: Shipped, source: Path, target: Path) -> None:
    """The graph that ONNX Runtime's basic optimisations leave."""
    _session(source, "ORT_ENABLE_BASIC", target)


def ort_extended(original: Shipped, source: Path, target: Path) -> None:
    """The graph that its extended optimisations leave, with operators of com.microsoft."""
    _session(source, "ORT_ENABLE_EXTENDED", target)


def _session(source: Path, level: str = "ORT_ENABLE_ALL", saved: Path | None = None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.__members__[level]
    if saved is not None:
        options.optimized_model_filepath = str(saved)
    return onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


MAKERS: dict[str, Callable[[Shipped, Path, Path], None]] = {
    maker.__name__.replace("_", "-"): maker
    for maker in (
        simplified, slimmed, optimized, opset_21, float16, dynamic_int8, static_int8, static_int8_channels, static_qlinear,
        blocks_int4, blocks_int8, transformer_optimized, ort_basic, ort_extended,
    )
}  # fmt: skip


TOOLS = ("onnxruntime", "onnx", "onnxsim", "onnxslim", "onnxoptimizer", "onnxconverter-common")


if __name__ == "__main__":
    if sys.argv[1:] == ["versions"]:
        print(json.dumps({tool: version(tool) for tool in TOOLS}))
        raise SystemExit
    name, source, maker, target = sys.argv[1:]
    MAKERS[maker](shipped()[name], Path(source), Path(target))
