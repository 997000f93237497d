"""What checks have found of kernels on a device, and how each is compiled therefore (`flashmem.runtime.checking`).

One file a device and driver, `checks/KEY.json` beside the program cache: for each kernel's text the launches that were right,
or what was wrong. A kernel that its driver miscompiles is compiled without optimisation, if that is right, and else refused.
Like the program cache, the file is the user's own, and any doubt about it is a miss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from flashmem.base.errors import RunError
from flashmem.base.files import read_regular, written_whole
from flashmem.base.paths import cache_folder, is_foreign, make_private
from flashmem.runtime.kernels.required import RequiredKernel
from flashmem.runtime.opencl.device import Device

UNOPTIMISED: Final = "-cl-opt-disable"
_VERSION = 3
"""Of the check: verdicts of another version are not used."""
_MOST_BYTES = 64 << 20


_KNOWN: Final[dict[Path, dict[str, Finding]]] = {}
"""By file: what this process has found, for when the file cannot be written."""


@dataclass(frozen=True)
class Finding:
    """What is known of a kernel's text.

    `right`: keys of the launches whose check found nothing; `sampled`: those of which a part was compared. `wrong`: what the
    driver's kernel did, or "". `options`: with which the kernel is right nevertheless; None if it is not. `trial`: the key of
    the launch that was wrong. `of_chain`: it is a chain's, in whose place its parts are used.
    """

    right: tuple[str, ...] = ()
    sampled: tuple[str, ...] = ()
    wrong: str = ""
    options: tuple[str, ...] | None = None
    name: str = ""
    trial: str = ""
    of_chain: bool = False


class Verdicts:
    """The findings of one device, in memory and in its file."""

    def __init__(self, device: Device, folder: Path | None = None) -> None:
        self._device = device
        self._folder = cache_folder("checks") if folder is None else folder
        name = hashlib.sha256(f"{_VERSION} {device.key}".encode()).hexdigest()
        self._file = self._folder / f"{name}.json"
        self._found = self._read() | _KNOWN.get(self._file, {})

    def __getitem__(self, key: str) -> Finding:
        """The finding of a text (`text_key`); nothing is known of an unknown one."""
        return self._found.get(key, Finding())

    @property
    def wrong(self) -> Mapping[str, Finding]:
        """The kernels that the driver miscompiles."""
        return {key: finding for key, finding in self._found.items() if finding.wrong}

    def keep(self, found: Mapping[str, Finding]) -> None:
        """Add findings, and write the file, which another process may have written since, if it can be written."""
        self._found = self._read() | self._found
        for key, finding in found.items():
            before = self[key]
            self._found[key] = replace(
                finding,
                right=tuple(dict.fromkeys((*before.right, *finding.right))),
                sampled=tuple(dict.fromkeys((*before.sampled, *finding.sampled))),
            )
        _KNOWN[self._file] = self._found
        with suppress(OSError):
            if is_foreign(self._folder):
                return
            make_private(self._folder)
            rows = {key: asdict(finding) for key, finding in self._found.items()}
            with written_whole(self._file, private=True) as file:
                file.write(json.dumps({"device": self._device.key, "kernels": rows}).encode())

    def _read(self) -> dict[str, Finding]:
        if is_foreign(self._folder):
            return {}
        try:
            held = json.loads(read_regular(self._file, _MOST_BYTES, links=False))
            return {key: _read_finding(row) for key, row in held["kernels"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def applied(self, kernels: Iterable[RequiredKernel], options: Sequence[str]) -> tuple[RequiredKernel, ...]:
        """Kernels with the options that are right on this device.

        Raises:
            RunError: the driver miscompiles one, with and without optimisation.
        """
        if not self.wrong:
            return tuple(kernels)
        return tuple(self._apply(each, options) for each in kernels)

    def _apply(self, kernel: RequiredKernel, options: Sequence[str]) -> RequiredKernel:
        finding = self[text_key(self._device, kernel.text, options)]
        if not finding.wrong:
            return kernel
        if finding.options is None:
            raise RunError(
                f"the driver of {self._device.name} miscompiles the kernel {kernel.name} ({finding.wrong}); use another driver "
                "or device"
            )
        return replace(kernel, options=finding.options)


def _read_finding(row: dict[str, Any]) -> Finding:
    options = row["options"]
    made = Finding(
        tuple(row["right"]),
        tuple(row["sampled"]),
        row["wrong"],
        None if options is None else tuple(options),
        row["name"],
        row["trial"],
        row["of_chain"] is True,
    )
    if not all(isinstance(each, str) for each in (made.wrong, made.trial, *made.right, *made.sampled, *(made.options or ()))):
        raise ValueError("not a finding")
    if made.options is not None and set(made.options) > {UNOPTIMISED}:
        raise ValueError("options that no check gives")
    return made


def text_key(device: Device, text: str, options: Sequence[str]) -> str:
    """The key of a kernel's text on a device whose driver compiles it with `options`."""
    return hashlib.sha256("\n".join((*options, device.with_instructions(text))).encode()).hexdigest()
