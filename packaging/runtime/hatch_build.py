"""What of the checkout the wheel `flashmem-runtime` holds: the commands of a phone, and every module that they import."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parent.parent.parent

COMMANDS = (
    "flashmem.__main__", "flashmem.cli.main", "flashmem.runtime.session", "flashmem.runtime.serving.runtime",
    "flashmem.runtime.application.manager", "flashmem.planning.replanning",
    "flashmem.planning.objectives.first", "flashmem.planning.objectives.steady",
    "flashmem.runtime.kernels.worker", "flashmem.tools.learn", "flashmem.cli.commands.bundles",
    "flashmem.cli.commands.devices", "flashmem.cli.commands.doctor", "flashmem.cli.commands.profile",
    "flashmem.cli.commands.run", "flashmem.cli.commands.generate", "flashmem.cli.commands.verify",
    "flashmem.runtime.generation.generator",
    "flashmem.runtime.generation.batch",
    "flashmem.tools.doctor.selftest", "flashmem.profiler.kit", "flashmem.profiler.measure",
    "flashmem.profiler.opening", "flashmem.profiler.phone_kit.measuring", "flashmem.profiler.phone_kit.rates",
    "flashmem.profiler.phone_kit.heat", "flashmem.profiler.phone_kit.storage", "flashmem.runtime.opencl.probes",
)  # fmt: skip
"""Where it is entered. What these import as they are imported comes along; what they import later is listed, or left out."""

DESCRIPTORS = "flashmem/devices/*.toml"
SOURCES = "\n[sources]\n"
"""The last table of a descriptor: where its numbers are from. Only who writes descriptors reads that, and the comments."""


class Hook(BuildHookInterface[Any]):
    """Names the files to hatchling."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel is built."""
        included = build_data["force_include"]
        files = [*modules(COMMANDS), ROOT / "flashmem/py.typed"]
        included.update({str(file): str(file.relative_to(ROOT)) for file in files})
        included[str(ROOT / "LICENSE")] = "flashmem/LICENSE"
        self._made = tempfile.TemporaryDirectory()
        for file in sorted(ROOT.glob(DESCRIPTORS)):
            numbers = Path(self._made.name, file.name)
            lines = file.read_text(encoding="utf-8").partition(SOURCES)[0].splitlines()
            numbers.write_text("\n".join(line for line in lines if line and not line.startswith("#")) + "\n", encoding="utf-8")
            included[str(numbers)] = str(file.relative_to(ROOT))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when the wheel is built."""
        self._made.cleanup()


def modules(names: tuple[str, ...]) -> list[Path]:
    """The files of the modules `names` and of all of flashmem that is imported with them."""
    found: dict[str, Path] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        file = _file(name)
        if file is None or name in found:
            continue
        found[name] = file
        parts = name.split(".")
        waiting += [".".join(parts[:count]) for count in range(1, len(parts))]
        waiting += _imported(ast.parse(file.read_text(encoding="utf-8")).body, name, file.name == "__init__.py")
    return sorted(found.values())


def _file(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _imported(body: list[ast.stmt], module: str, is_package: bool) -> Iterator[str]:
    """What statements import as they are run; neither functions nor what only type checkers see."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            base = (
                ".".join([*parts[: len(parts) + 1 - node.level], *filter(None, [node.module])]) if node.level else node.module
            )
            yield from (base or "", *(f"{base}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            for inner in (node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])):
                yield from _imported(inner, module, is_package)
