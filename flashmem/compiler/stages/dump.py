"""Results of stages as text files, to read and to compare with `diff`: `flashmem compile --dump-stages DIR`.

Files are numbered as stages are, 01-import.txt to 13-pack.txt; the folder 02-rewrite has a file for each pass. There is no file
of a stage that was left out, such as patches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashmem.base.errors import UserError
from flashmem.base.files import written_whole
from flashmem.base.paths import can_be_written
from flashmem.compiler.ir.graph import Graph
from flashmem.compiler.passes.fusion import split
from flashmem.compiler.passes.pipeline import PASSES, Pass
from flashmem.compiler.stages.planned import CompiledVariant
from flashmem.compiler.stages.stage import Stage
from flashmem.compiler.stages.stages import (
    FUSE,
    IMPORT,
    INSTRUCTION_SETS,
    JOIN,
    LAY_OUT,
    LOWER,
    ORDER,
    PATCH,
    PLACE,
    PLAN,
    REWRITE,
    STAGES,
    STEADY,
)  # fmt: skip
from flashmem.compiler.stages.texts import plan_text


class StageFolder:
    """A folder with the text files of one program, or of all programs of a model, which is created if it is missing.

    Raises:
        UserError: files cannot be written there.
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--dump-stages {folder} is not a folder; name one")
        if not folder.parent.is_dir():
            raise UserError(f"--dump-stages {folder}: there is no folder {folder.parent}; create it first")
        if not can_be_written(folder):
            raise UserError(f"--dump-stages {folder} cannot be written; name another folder")
        folder.mkdir(exist_ok=True)
        self.folder = folder

    def of_variant(self, number: int) -> StageFolder:
        """The folder of one of several shape variants."""
        return StageFolder(self.folder / f"variant-{number}")

    def write(self, stage: Stage[Any, Any], text: str) -> None:
        """Write the result of a stage."""
        self._write(f"{_numbered(stage)}.txt", text)

    def read(self, imported: Graph) -> Graph:
        """Rewrite a graph as imported, and write it before, after each pass and in the end.

        Raises:
            InvalidResultError: a pass broke a rule; its result is written first.
        """
        self.write(IMPORT, IMPORT.text(imported))
        passes = StageFolder(self.folder / _numbered(REWRITE))

        def observe(step: Pass, graph: Graph) -> None:
            passes._write(f"{PASSES.index(step) + 1:02}-{step.name}.txt", REWRITE.text(graph))

        graph = REWRITE(imported, observe)
        self.write(REWRITE, REWRITE.text(graph))
        return graph

    def compiled(self, made: CompiledVariant, read: Graph) -> None:
        """Write the results from the graph as `read` to the layouts. Those that nothing keeps are made again."""
        placed = made.generated.placed
        generated = made.generated
        ordered = placed.fused
        if ordered.graph is not read:
            self.write(PATCH, PATCH.text(ordered.graph))
        self.write(FUSE, FUSE.text(split(FUSE(ordered.graph), ordered.cuts)))
        self.write(ORDER, ORDER.text(ordered))
        self.write(PLACE, PLACE.text(PLACE(ordered, placed.precision)))
        self.write(JOIN, JOIN.text(placed))
        self.write(LOWER, LOWER.text(generated))
        self.write(PLAN, plan_text(made.plan))
        self.write(INSTRUCTION_SETS, INSTRUCTION_SETS.text(made.elsewhere))
        self.write(STEADY, STEADY.text(generated))
        self.write(LAY_OUT, LAY_OUT.text(made))

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        try:
            with written_whole(path) as file:
                file.write(text.encode())
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}; name another folder for --dump-stages") from error


def _numbered(stage: Stage[Any, Any]) -> str:
    return f"{STAGES.index(stage) + 1:02}-{stage.name}"
