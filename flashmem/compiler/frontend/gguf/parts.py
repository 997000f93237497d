"""The parts of a model in several GGUF files, as llama.cpp's `llama-gguf-split` names them: NAME-00001-of-00003.gguf.

The first part has the fields of the model, and each has its number, their count and the number of all tensors.
"""

from __future__ import annotations

import re
from pathlib import Path

from flashmem.base.errors import MissingFileError, UserError
from flashmem.compiler.frontend.gguf.part import GGUFPart

_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def read_parts(path: Path) -> list[GGUFPart]:
    """The file `path`, or all parts of the model of which it is one, the first one first.

    Raises:
        MissingFileError: a part is not beside the others.
        UserError: a file is damaged, or the parts are not those of one model.
    """
    given = GGUFPart(path)
    count = given.number("split.count")
    if count <= 1:
        return [given]
    number = given.number("split.no")
    name = _NAME.fullmatch(path.name)
    if name is None or (int(name[2]), int(name[3])) != (number + 1, count):
        raise UserError(
            f"{path} is part {number + 1} of the {count} parts of a model, and its name does not say so; name it "
            f"{_named('NAME', number, count)}, and the other parts likewise"
        )
    parts = [given if each == number else _other(path, path.with_name(_named(name[1], each, count))) for each in range(count)]
    for each, part in enumerate(parts):
        if (part.number("split.no"), part.number("split.count")) != (each, count):
            raise UserError(
                f"{part.path} says that it is part {part.number('split.no') + 1} of {part.number('split.count')}, unlike its "
                "name; download it again"
            )
    wanted = given.number("split.tensors.count")
    found = sum(len(part.tensors) for part in parts)
    if found != wanted or any(part.number("split.tensors.count") != wanted for part in parts):
        raise UserError(
            f"the {count} parts of {path} have {found} tensors, and {wanted} are said to be in them; get the parts of one model"
        )
    return parts


def _other(given: Path, path: Path) -> GGUFPart:
    if not path.is_file():
        raise MissingFileError(f"{path} is missing, a part of the model of {given.name}; put all parts into one folder")
    return GGUFPart(path)


def _named(name: str, number: int, count: int) -> str:
    return f"{name}-{number + 1:05d}-of-{count:05d}.gguf"
