"""Writes a device descriptor as TOML, for `flashmem.target.descriptor.load_descriptor`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from flashmem.base.files import written_whole
from flashmem.base.resources import read_bytes
from flashmem.compiler.selection.counted_code import CODE
from flashmem.compiler.selection.tuning_database import SUFFIX
from flashmem.planning.capacity.model import SECONDS, SLOWDOWN
from flashmem.target.descriptor import DeviceDescriptor, Rates

_TABLES = ("modes", "tile", "code", "pipelines", "registers", "probed", "rates", "sources")
_OF_CONFIGS = "configs"
_TUNED = re.compile(r"^tuned *=.*$", re.MULTILINE)
_NAME = re.compile(r"^name *=.*$", re.MULTILINE)


def write_descriptor(folder: Path, descriptor: DeviceDescriptor, source: str, what: str) -> Path:
    """Write NAME.toml atomically, and return its path. Every rate, and the key `measured_on`, gets `source`."""
    sources = {name: source for name in (*(field.name for field in fields(Rates)), "measured_on")}
    sources["tile"] = descriptor.sources.get("tile", "chosen by hand; see docs/research/opencl-notes.md")
    kept = {key: said for key, said in descriptor.sources.items() if key not in sources}
    tuned = _beside(folder, descriptor.tuned, (SUFFIX,))
    head = f"# Written by flashmem profile: a {what} that is measured. Profile again rather than edit."
    return _write(
        folder / f"{descriptor.name}.toml", descriptor_toml(replace(descriptor, tuned=tuned, sources={**sources, **kept}), head)
    )


def name_table(folder: Path, descriptor: DeviceDescriptor, name: str) -> Path:
    """Set the tuning database of the descriptor in `folder` to `name`, and return its path.

    An existing descriptor keeps everything else, including comments. Otherwise `descriptor` is written with its capacity model,
    so that the folder is complete.
    """
    path = folder / f"{descriptor.name}.toml"
    line = f"tuned = {_value(name)}"
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        if _TUNED.search(text):
            return _write(path, _TUNED.sub(line, text, count=1))
        return _write(path, _NAME.sub(lambda found: f"{found[0]}\n{line}", text, count=1))
    model = _beside(folder, descriptor.capacity_model, (SECONDS, SLOWDOWN))
    counted = _beside(folder, descriptor.counted, (CODE,))
    head = "# Written by flashmem tune; everything but its table is that of the descriptor of the same name."
    return _write(path, descriptor_toml(replace(descriptor, capacity_model=model, counted=counted, tuned=name), head))


def _beside(folder: Path, stem: str, suffixes: Sequence[str]) -> str:
    """Copy files that a descriptor names, shipped or by path, to `folder`; returns their name there, "" for none."""
    if stem:
        for suffix in suffixes:
            source = Path(stem + suffix)
            content = source.read_bytes() if source.is_absolute() else read_bytes("devices", source.name)
            with written_whole(folder / source.name) as file:
                file.write(content)
    return Path(stem).name


def descriptor_toml(descriptor: DeviceDescriptor, head: str) -> str:
    """The descriptor as TOML text."""
    data = descriptor.to_dict()
    apart = (*_TABLES, _OF_CONFIGS, "only")
    lines = [head, *(f"{key} = {_value(value)}" for key, value in data.items() if key not in apart)]
    lines += ["", f"{_OF_CONFIGS} = [", *(f"    {_inline(config)}," for config in data[_OF_CONFIGS]), "]"]
    for table in _TABLES:
        content = data[table] or {}
        nested = {key: value for key, value in content.items() if isinstance(value, dict)}
        lines += ["", f"[{table}]", *(f"{key} = {_value(value)}" for key, value in content.items() if key not in nested)]
        for key, values in nested.items():
            lines += ["", f"[{table}.{key}]", *(f"{name} = {_value(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> Path:
    with written_whole(path) as file:
        file.write(text.encode())
    return path


def _inline(table: dict[str, Any]) -> str:
    """A table on one line."""
    return f"{{ {', '.join(f'{key} = {_value(value)}' for key, value in table.items())} }}"


def _value(value: Any) -> str:
    """A TOML value: strings, booleans and lists in JSON syntax; rates with four digits."""
    if isinstance(value, float):
        text = f"{value:.4g}"
        return text if any(mark in text for mark in ".en") else text + ".0"
    return json.dumps(list(value) if isinstance(value, tuple) else value)
