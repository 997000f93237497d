"""A device descriptor as TOML, as `flashmem.device.load_descriptor` reads it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from flashmem.device import DeviceDescriptor, Rates
from flashmem.files import written_whole

_TABLES = ("modes", "tile", "rates", "sources")


def write_descriptor(folder: Path, descriptor: DeviceDescriptor, source: str, what: str) -> Path:
    """Write NAME.toml, whole or not at all, and return its path. Every rate gets `source` as its source."""
    sources = {field.name: source for field in fields(Rates)}
    sources["tile"] = descriptor.sources.get("tile", "chosen by hand; see docs/opencl-notes.md")
    if "parallelism" in descriptor.sources:
        sources["parallelism"] = descriptor.sources["parallelism"]
    data = descriptor.to_dict()
    lines = [f"# Written by flashmem profile: a {what} that is measured. Profile again rather than edit."]
    lines += [f"{key} = {_value(value)}" for key, value in data.items() if key not in _TABLES]
    for table in _TABLES:
        content = sources if table == "sources" else data[table]
        nested = {key: value for key, value in content.items() if isinstance(value, dict)}
        lines += ["", f"[{table}]", *(f"{key} = {_value(value)}" for key, value in content.items() if key not in nested)]
        for key, values in nested.items():
            lines += ["", f"[{table}.{key}]", *(f"{name} = {_value(value)}" for name, value in values.items())]
    path = folder / f"{descriptor.name}.toml"
    with written_whole(path) as file:
        file.write(("\n".join(lines) + "\n").encode())
    return path


def _value(value: Any) -> str:
    """A TOML value: strings, booleans and lists are written as JSON writes them; rates with four digits."""
    if isinstance(value, float):
        text = f"{value:.4g}"
        return text if any(mark in text for mark in ".en") else text + ".0"
    return json.dumps(list(value) if isinstance(value, tuple) else value)
