"""Fuzzing of `flashmem.compile` with changed ONNX files: each must end in a bundle or in one sentence.

    python -m tests.fuzz.models --count 10000 --seed 0 [--keep FOLDER]

Files are changed as bytes (flipped, inserted, removed) and as models (types and values of attributes, dimensions, names,
edges, nodes, operator sets, data). Each goes through `flashmem.compile` in a forked process with `SECONDS` seconds of
computing and a limit on its address space: what the process had before, plus `SPARE` bytes, which the limits on folded
constants allow, and `PER_BYTE` for each byte of the file. Everything but a bundle or a UserError of one line is a finding; its
file is kept.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from flashmem.compiler.frontend.importer import is_native
from tests.support.paths import DATA, ROOT

DESCRIPTOR = ROOT / "devices" / "generic-cpu.toml"  # as a file: no OpenCL is queried
SECONDS = 10
SPARE = 2 << 30
PER_BYTE = 128
SHAPES: dict[str, tuple[int, ...]] = {"input_ids": (1, 16)}

EXTREMES = [0, 1, -1, 2, 3, 7, 255, 65537, 2**20, 10**9, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63)]
REALS = [0.0, -0.0, 1e9, -1e9, 1e38, float("inf"), float("-inf"), float("nan"), 0.5, 1e-30]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one file: "compiled", "refused", or a description of the error; and the bytes of memory used."""

    kind: str
    text: str = ""
    grown: int = 0


@dataclass
class Findings:
    """The outcomes of many files."""

    outcomes: Counter[str] = field(default_factory=Counter)
    sentences: Counter[str] = field(default_factory=Counter)
    found: list[tuple[str, Outcome]] = field(default_factory=list)
    grown: int = 0


def run(count: int, seed: int, keep: Path | None = None) -> Findings:
    """Change and compile `count` files; those with findings are saved to `keep`."""
    findings = Findings()
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate(mutants(count, seed)):
            path = Path(folder) / "model.onnx"
            path.write_bytes(content)
            outcome = compile_apart(path, Path(folder) / "model.flashmem")
            findings.outcomes[outcome.kind] += 1
            findings.grown = max(findings.grown, outcome.grown)
            if outcome.kind == "refused":
                findings.sentences[" ".join(outcome.text.replace(str(path), "").split()[:6])] += 1
            if outcome.kind not in ("compiled", "refused"):
                name = f"{seed}-{number}.onnx"
                findings.found.append((name, outcome))
                if keep is not None:
                    keep.mkdir(parents=True, exist_ok=True)
                    (keep / name).write_bytes(content)
                    (keep / f"{name}.txt").write_text(f"{outcome.kind}\n{outcome.text}\n")
    return findings


def compile_apart(path: Path, output: Path) -> Outcome:
    """Compile `path` in a forked process."""
    importlib.import_module("flashmem.compile")  # once, before the fork
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(_compile(path, output), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return Outcome("took too long" if name in ("SIGPROF", "SIGALRM") else "crashed", name)
    return pickle.loads(answer)


def _compile(path: Path, output: Path) -> Outcome:
    from flashmem.base.errors import UserError
    from flashmem.compile import compile

    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of computing time; other processes may delay it
    signal.alarm(12 * SECONDS)
    before = _status("VmRSS")
    limit = _status("VmSize") + SPARE + PER_BYTE * path.stat().st_size
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (the process ends here)
    try:
        shapes = {name: shape for name, shape in SHAPES.items() if name.encode() in path.read_bytes()}
        compile(path, output, device=str(DESCRIPTOR), shapes=shapes)
        kind, text = "compiled", ""
    except UserError as error:
        text = str(error)
        kind = "refused" if text.isprintable() and " " in text else "not a sentence"
        if "MemoryError" in text or "bad_alloc" in text:
            kind = "out of memory"
    except MemoryError:
        kind, text = "out of memory", traceback.format_exc()
    except BaseException as error:
        kind, text = f"{type(error).__name__} in {_place(error)}", traceback.format_exc()
    return Outcome(kind, text, _status("VmHWM") - before)


def _status(key: str) -> int:
    """A size of this process that Linux reports, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def _place(error: BaseException) -> str:
    """The innermost function of flashmem in the traceback of the error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "flashmem" in frame.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else "?"


# Changes


def mutants(count: int, seed: int) -> Iterator[bytes]:
    """`count` changed files."""
    draw = random.Random(seed)
    sources = bases()
    native = [content for content in sources if _is_native(content)]
    for _ in range(count):
        content = draw.choice(draw.choice((sources, native, native, native)))
        if draw.random() < 0.25:
            yield change_bytes(content, draw)
            continue
        model = onnx.ModelProto.FromString(content)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            try:
                draw.choice(CHANGES)(model, draw)
            except Exception:  # nothing to change, no such value, or invalid in onnx after an earlier change
                continue
        yield model.SerializeToString()


@cache
def bases() -> list[bytes]:
    """Models to change: small files of the tests, and ONNX's own node tests with and without their inputs as constants."""
    found = [path.read_bytes() for path in sorted(DATA.glob("*.onnx")) if path.stat().st_size < 40_000]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        cases = [case for case in collect_testcases(None) if case.model is not None and case.model.opset_import]
    for case in cases:
        opset = case.model.opset_import[0]
        if opset.domain or opset.version > 26:
            continue
        model = onnx.ModelProto()
        model.CopyFrom(case.model)
        found.append(model.SerializeToString())
        arrays, values = case.data_sets[0][0], list(model.graph.input)
        if len(arrays) == len(values) > 1 and all(isinstance(array, np.ndarray) for array in arrays):
            for value, array in list(zip(values, arrays, strict=True))[1:]:
                model.graph.initializer.append(numpy_helper.from_array(array, value.name))
                model.graph.input.remove(value)
            found.append(model.SerializeToString())
    return [content for content in found if len(content) < 40_000]


def _is_native(content: bytes) -> bool:
    return all(is_native(node.op_type) for node in onnx.ModelProto.FromString(content).graph.node)


def change_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, inserted, removed or repeated."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at, length = draw.randrange(len(data) + 1), draw.choice((1, 1, 2, 4, 16))
        match draw.randrange(4):
            case 0:
                data[at : at + length] = draw.randbytes(length)
            case 1:
                data[at:at] = draw.randbytes(length)
            case 2:
                del data[at : at + length]
            case 3 if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
            case _:
                data[at:at] = data[at : at + length]
    return bytes(data)


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [*model.graph.node, *(node for function in model.functions for node in function.node)]


def _attribute(model: onnx.ModelProto, draw: random.Random) -> None:
    """Change the value or type of an attribute, add one, or remove one."""
    node = draw.choice(_nodes(model))
    if not node.attribute or draw.random() < 0.15:
        known = onnx.defs.get_schema(node.op_type).attributes if onnx.defs.has(node.op_type) else {"axis": None}
        name = draw.choice(sorted(known) or ["axis"])
        node.attribute.append(onnx.helper.make_attribute(name, _value(draw)))
        return
    attribute = draw.choice(node.attribute)
    if draw.random() < 0.1:
        node.attribute.remove(attribute)
    elif draw.random() < 0.2:
        attribute.type = draw.choice(onnx.AttributeProto.AttributeType.values())
    elif attribute.type == onnx.AttributeProto.INT and draw.random() < 0.8:
        attribute.i = draw.choice(EXTREMES)
    elif attribute.type == onnx.AttributeProto.FLOAT and draw.random() < 0.8:
        attribute.f = draw.choice(REALS[:5] + REALS[5:])
    elif attribute.type == onnx.AttributeProto.INTS and attribute.ints and draw.random() < 0.8:
        attribute.ints[draw.randrange(len(attribute.ints))] = draw.choice(EXTREMES)
    elif attribute.type == onnx.AttributeProto.INTS and draw.random() < 0.5:
        attribute.ints.append(draw.choice(EXTREMES))
    else:
        attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, _value(draw)))


def _value(draw: random.Random) -> object:
    return draw.choice(
        [draw.choice(EXTREMES), draw.choice(REALS), "", "nearest", draw.choices(EXTREMES, k=draw.randrange(1, 9)), ["a", "b"]]
    )


def _dimension(model: onnx.ModelProto, draw: random.Random) -> None:
    """Change the size of a dimension, add one, remove one, or make all unknown; of an input, an output or a weight."""
    if model.graph.initializer and draw.random() < 0.4:
        dims = draw.choice(model.graph.initializer).dims
        match draw.randrange(3):
            case 0:
                dims[draw.randrange(len(dims))] = draw.choice(EXTREMES)
            case 1:
                dims.append(draw.choice(EXTREMES[:5]))
            case _:
                dims.pop()
        return
    value = draw.choice([*model.graph.input, *model.graph.input, *model.graph.output, *model.graph.value_info])
    shape = value.type.tensor_type.shape
    match draw.randrange(6):
        case 0 | 1 | 2:
            shape.dim[draw.randrange(len(shape.dim))].dim_value = draw.choice(EXTREMES)
        case 3:
            shape.dim.add(dim_value=draw.choice(EXTREMES[:6]))
        case 4:
            shape.dim.pop()
        case _:
            value.type.tensor_type.ClearField("shape")


def _type(model: onnx.ModelProto, draw: random.Random) -> None:
    """Change the element type, to another, a sequence, or none."""
    types = onnx.TensorProto.DataType.values()
    if model.graph.initializer and draw.random() < 0.4:
        draw.choice(model.graph.initializer).data_type = draw.choice(types)
        return
    value = draw.choice([*model.graph.input, *model.graph.output])
    if draw.random() < 0.2:
        value.ClearField("type")
    elif draw.random() < 0.2:
        value.type.CopyFrom(onnx.helper.make_sequence_type_proto(value.type))
    else:
        value.type.tensor_type.elem_type = draw.choice(types)


def _edge(model: onnx.ModelProto, draw: random.Random) -> None:
    """Rename an input or an output of a node to another name of the model, remove or repeat it."""
    node = draw.choice(_nodes(model))
    names = [name for other in _nodes(model) for name in (*other.input, *other.output)]
    names += [value.name for value in (*model.graph.input, *model.graph.output, *model.graph.initializer)]
    ends = draw.choice((node.input, node.input, node.output))
    match draw.randrange(5):
        case 0:
            ends.pop()
        case 1:
            ends.append(draw.choice([*names, ""]))
        case 2:
            ends[draw.randrange(len(ends))] = ""
        case _:
            ends[draw.randrange(len(ends))] = draw.choice(names)


def _node(model: onnx.ModelProto, draw: random.Random) -> None:
    """Repeat, remove or move a node, or change its operator or domain."""
    nodes = model.graph.node
    index = draw.randrange(len(nodes))
    match draw.randrange(6):
        case 0:
            nodes.append(nodes[index])
        case 1:
            copy = nodes.add()
            copy.CopyFrom(nodes[index])
            copy.output[:] = [f"{name}_again" for name in copy.output]
            model.graph.output.add().CopyFrom(onnx.helper.make_empty_tensor_value_info(copy.output[0]))
        case 2:
            del nodes[index]
        case 3:
            nodes.insert(0, nodes.pop())
        case 4:
            nodes[index].domain = draw.choice(("ai.onnx", "ai.onnx.ml", "com.microsoft", "mine"))
        case _:
            nodes[index].op_type = draw.choice(sorted({schema.name for schema in onnx.defs.get_all_schemas()}))


def _port(model: onnx.ModelProto, draw: random.Random) -> None:
    """Repeat, remove or rename an input or output of the model."""
    ports = draw.choice((model.graph.input, model.graph.output, model.graph.initializer))
    index = draw.randrange(len(ports))
    match draw.randrange(4):
        case 0:
            ports.add().CopyFrom(ports[index])
        case 1:
            del ports[index]
        case 2:
            ports[index].name = draw.choice(("", "x", "\n", model.graph.input[0].name))
        case _:
            model.graph.output.add().CopyFrom(model.graph.input[0])


def _data(model: onnx.ModelProto, draw: random.Random) -> None:
    """Truncate or lengthen the data of a weight, move it to another file, or change its numbers."""
    tensor = draw.choice(model.graph.initializer)
    match draw.randrange(4):
        case 0:
            tensor.raw_data = tensor.raw_data[: draw.randrange(len(tensor.raw_data) + 1)]
        case 1:
            tensor.raw_data += bytes(draw.choice((1, 4, 8)))
        case 2:
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value=draw.choice(("", "model.onnx", "/etc/passwd", "..", "gone")))
        case _:
            array = numpy_helper.to_array(tensor).copy()
            numbers = EXTREMES if array.dtype.kind in "iu" else REALS
            array.flat[draw.randrange(array.size)] = np.array(draw.choice(numbers)).astype(array.dtype)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _opset(model: onnx.ModelProto, draw: random.Random) -> None:
    model.opset_import[0].version = draw.choice([*range(9, 30), 0, -1, 2**31])
    if draw.random() < 0.2:
        model.ir_version = draw.choice((0, 1, 3, 4, 13, 99))


CHANGES: list[Callable[[onnx.ModelProto, random.Random], None]] = [
    *(_attribute, _attribute, _dimension, _dimension, _type, _edge, _node, _port, _data, _data, _opset),
]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("findings"))
    options = parser.parse_args()
    findings = run(options.count, options.seed, options.keep)
    for kind, count in findings.outcomes.most_common():
        print(f"{count:7} {kind}")
    print(f"memory grew by {findings.grown / 1e6:.0f} MB at most")
    for name, outcome in findings.found:
        print(f"{options.keep / name}: {outcome.kind}")
    sys.exit(1 if findings.found else 0)


if __name__ == "__main__":
    main()
