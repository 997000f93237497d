"""ONNX backend interface (`onnx.backend.base`): prepare a model, then run it on arrays.

    import flashmem.tools.onnx_backend as backend
    outputs = backend.prepare(model, device="CPU").run([x])

The interface has data only when a model runs. The compiler needs shapes, and some inputs as constants: the shape of Reshape,
the pads of Pad, the weights of Conv. So the first `run` compiles for the shapes of its arrays. It compiles the model unchanged
if possible. If flashmem refuses it, inputs become constants step by step. The first are integers and booleans of rank 0 and 1,
then also floats of rank 0 and 1, then everything but the first input. At least one input is never a constant, so that no answer
is folded away. A later run compiles again if it has other shapes, or other data in an input that became a constant. This is for
tests and comparisons; for speed, use `flashmem.compile` and `flashmem.Session`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import onnx
import onnx.backend.base
from numpy.typing import NDArray
from onnx import numpy_helper

from flashmem.base.errors import NoDeviceError, UserError
from flashmem.base.types import MemoryPath, TransferMode
from flashmem.compile import compile as compile_model
from flashmem.compiler.frontend.importer import OPSETS
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.discovery import find_device, list_devices
from flashmem.runtime.session import Session

Array = NDArray[Any]


class Representation(onnx.backend.base.BackendRep):
    """A prepared model on one device. It keeps one compiled form of the model, that of the last run."""

    def __init__(
        self,
        model: onnx.ModelProto,
        device: Device,
        memory_path: MemoryPath | Literal["auto"],
        mode: TransferMode | Literal["auto"],
    ) -> None:
        self._model = _in_known_opset(model)
        self._device = device
        self._memory_path = memory_path
        self._mode = mode
        known = {tensor.name for tensor in model.graph.initializer}
        self._names = [value.name for value in model.graph.input if value.name not in known]
        self._session: Session | None = None
        self._fixed: dict[str, Array] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    @property
    def constants(self) -> tuple[str, ...]:
        """The inputs that were constants in the last compilation."""
        return tuple(self._fixed)

    def run(self, inputs: Sequence[Any] | Mapping[str, Any], **kwargs: Any) -> tuple[Array, ...]:
        """Run the model; its outputs, in the model's order and types.

        Args:
            inputs: an array or TensorProto for each input that is not an initializer, in the model's order or by name.
            kwargs: refused; ONNX's interface can pass them.

        Raises:
            UserError: flashmem cannot run the model or an input (UnsupportedModelError: its operators).
            RunError: the run failed.
        """
        if kwargs:
            raise UserError(f"run has no option {next(iter(kwargs))!r}; leave it out")
        arrays = self._arrays(inputs)
        if not self._fits(arrays):
            self._compile(arrays)
        assert self._session is not None
        feeds = {name: array for name, array in arrays.items() if name not in self._fixed}
        return tuple(self._session.run(None, feeds))

    def close(self) -> None:
        """Release the device's memory. The next run compiles again."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _arrays(self, inputs: Sequence[Any] | Mapping[str, Any]) -> dict[str, Array]:
        given = dict(inputs) if isinstance(inputs, Mapping) else dict(zip(self._names, inputs, strict=False))
        if len(inputs) != len(self._names) or any(name not in given for name in self._names):
            raise UserError(f"the model takes {len(self._names)} inputs ({', '.join(self._names)}); give exactly these")
        return {name: _array(name, given[name]) for name in self._names}

    def _fits(self, arrays: Mapping[str, Array]) -> bool:
        if self._session is None or {name: array.shape for name, array in arrays.items()} != self._shapes:
            return False
        return all(_same_bits(array, arrays[name]) for name, array in self._fixed.items())

    def _compile(self, arrays: Mapping[str, Array]) -> None:
        self.close()
        refused: UserError | None = None
        for fixed in _ways(self._names, arrays):
            try:
                self._session = self._open(_bound(self._model, arrays, fixed))
            except UserError as error:
                refused = error
                continue
            self._fixed = {name: arrays[name].copy() for name in fixed}
            self._shapes = {name: array.shape for name, array in arrays.items()}
            return
        assert refused is not None
        raise refused

    def _open(self, model: onnx.ModelProto) -> Session:
        # The session keeps the bundle's files open, so the folder can be removed at once.
        with tempfile.TemporaryDirectory(prefix="flashmem-") as folder:
            path = Path(folder) / "model.onnx"
            path.write_bytes(model.SerializeToString())
            try:
                bundle = compile_model(
                    path,
                    path.with_suffix(".flashmem"),
                    device=self._device.descriptor_name,
                    memory_path=self._memory_path,
                    mode=self._mode,
                    build=False,  # this process builds the kernels in the run that follows
                )
            except UserError as error:
                error.args = (str(error).replace(str(path), "the model"), *error.args[1:])  # the caller named no file
                raise
            return Session(bundle, device=self._device.descriptor_name, build_apart=False)


class Backend(onnx.backend.base.Backend):
    """ONNX's backend interface, on OpenCL devices."""

    @classmethod
    def prepare(
        cls,
        model: onnx.ModelProto,
        device: str = "CPU",
        *,
        memory_path: MemoryPath | Literal["auto"] = "auto",
        mode: TransferMode | Literal["auto"] = "auto",
        **kwargs: Any,
    ) -> Representation:
        """Check `model` and prepare it for `device`. Its first run compiles it (see the module).

        Args:
            model: an ONNX model with its weights inside.
            device: "CPU" or "GPU" for the first device of that kind, or a name as for `flashmem run --device`.
            memory_path: where kernels read weights from, as in `flashmem.compile`.
            mode: the transfer mode, as in `flashmem.compile`.
            kwargs: refused; ONNX's interface can pass them.

        Raises:
            NoDeviceError: no such device.
            UserError: the model is not valid ONNX, or an option is unknown.
        """
        if kwargs:
            raise UserError(f"prepare has no option {next(iter(kwargs))!r}; it takes memory_path and mode")
        try:
            onnx.checker.check_model(model)
        except onnx.checker.ValidationError as error:
            raise UserError(f"the model is not valid ONNX: {str(error).splitlines()[0]}") from error
        return Representation(model, _device(device), memory_path, mode)

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Array, ...]:
        """Prepare `model`, run it once and release everything. Arguments and errors are those of `prepare` and `run`."""
        with cls.prepare(model, device, **kwargs) as representation:
            return representation.run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Sequence[Any],
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Array, ...]:
        """Run one node. Errors are those of `prepare` and `run`.

        Args:
            node: the node; `inputs` has a value for each of its inputs with a name.
            inputs: arrays or TensorProtos.
            device: as in `prepare`.
            outputs_info: element type and shape of every output; inferred when None.
            kwargs: as in `prepare`, and `opset_version`, of the ONNX operator set (by default the newest that flashmem reads).
        """
        opset = kwargs.pop("opset_version", OPSETS[-1])
        names = list(dict.fromkeys(name for name in node.input if name))
        arrays = [_array(name, value) for name, value in zip(names, inputs, strict=True)]
        graph = onnx.GraphProto(name=node.op_type)
        graph.node.append(node)
        for name, array in zip(names, arrays, strict=True):
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            graph.input.append(onnx.helper.make_tensor_value_info(name, kind, array.shape))
        for index, name in enumerate(node.output):
            if outputs_info is None:
                graph.output.append(onnx.ValueInfoProto(name=name))
            else:
                dtype, shape = outputs_info[index]
                kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
                graph.output.append(onnx.helper.make_tensor_value_info(name, kind, shape))
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(node.domain, opset)])
        if outputs_info is None:
            try:
                model = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
            except onnx.shape_inference.InferenceError as error:
                raise UserError(f"the node is not valid ONNX: {str(error).splitlines()[0]}") from error
        return cls.run_model(model, arrays, device, **kwargs)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether `prepare` finds `device`."""
        try:
            _device(device)
        except NoDeviceError:
            return False
        return True


prepare = Backend.prepare
run_model = Backend.run_model
run_node = Backend.run_node
supports_device = Backend.supports_device
is_compatible = Backend.is_compatible


def _device(name: str) -> Device:
    kind = name.split(":")[0].lower()
    if kind not in ("cpu", "gpu"):
        return find_device(name)
    for device in list_devices():
        if device.kind == kind:
            return device
    raise NoDeviceError(f"no OpenCL device is a {kind.upper()}; 'flashmem devices' shows those that are here")


def _array(name: str, value: Any) -> Array:
    if isinstance(value, onnx.TensorProto):
        value = numpy_helper.to_array(value)
    if value is None or isinstance(value, (list, tuple, Mapping)):
        raise UserError(f"input {name!r} is not a tensor (a sequence, a map or an optional value); give an array")
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        raise UserError(f"input {name!r} holds strings, which are not supported; give numbers")
    return array


def _same_bits(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def _ways(names: Sequence[str], arrays: Mapping[str, Array]) -> Iterator[list[str]]:
    """The sets of inputs to try as constants, smallest first; never all inputs."""
    flat = [name for name in names if arrays[name].ndim <= 1]
    integers = [name for name in flat if arrays[name].dtype.kind in "iub"]
    yield []
    tried: list[list[str]] = [[]]
    for way in (integers, flat, flat[1:] if flat == list(names) else flat, list(names[1:])):
        if way not in tried and len(way) < len(names):
            tried.append(way)
            yield way


def _bound(model: onnx.ModelProto, arrays: Mapping[str, Array], fixed: Sequence[str]) -> onnx.ModelProto:
    """A copy of `model` with inputs of the shapes of `arrays`, and with the inputs in `fixed` as constants."""
    bound = onnx.ModelProto()
    bound.CopyFrom(model)
    inputs = [value for value in bound.graph.input if value.name not in fixed]
    del bound.graph.input[:]
    bound.graph.input.extend(inputs)
    bound.graph.initializer.extend(numpy_helper.from_array(arrays[name], name) for name in fixed)
    for value in bound.graph.input:
        if value.type.HasField("optional_type"):  # an optional input with a value
            value.type.CopyFrom(onnx.TypeProto.FromString(value.type.optional_type.elem_type.SerializeToString()))
        if value.name in arrays and value.type.HasField("tensor_type"):
            shape = value.type.tensor_type.shape
            shape.Clear()
            for size in arrays[value.name].shape:
                shape.dim.add(dim_value=size)
    return bound


def _in_known_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Declare `model` for the nearest operator set that flashmem reads, if none of its operators differs between the two.

    An operator of a newer set may have more element types, but no other inputs, outputs or attributes. A model with an operator
    that changed in another way stays unchanged, and its compilation fails.
    """
    if model.functions or any(attribute.HasField("g") for node in model.graph.node for attribute in node.attribute):
        return model
    other = onnx.ModelProto()
    other.CopyFrom(model)
    for entry in other.opset_import:
        if entry.domain in ("", "ai.onnx"):
            version = min(max(entry.version, OPSETS[0]), OPSETS[-1])
            same = _signature if version < entry.version else _version
            if any(same(node, entry.version) != same(node, version) for node in model.graph.node):
                return model
            entry.version = version
    return other


def _signature(node: onnx.NodeProto, opset: int) -> object:
    """The operator's inputs, outputs and attributes in an operator set, without element types."""
    if _version(node, opset) is None:
        return None
    schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    ports = [[(port.name, port.option) for port in side] for side in (schema.inputs, schema.outputs)]
    attributes = {name: (each.required, each.default_value.SerializeToString()) for name, each in schema.attributes.items()}
    return ports, attributes


def _version(node: onnx.NodeProto, opset: int) -> int | None:
    """The version of the node's operator in an operator set."""
    try:
        return int(onnx.defs.get_schema(node.op_type, opset, node.domain).since_version)
    except onnx.defs.SchemaError:
        return None
