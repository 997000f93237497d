"""Discovery of OpenCL drivers installed by pip, for the OpenCL loader.

`pip install intel-opencl-rt` installs a complete OpenCL driver for CPUs. But its `.icd` file names a path that does not exist,
so that no loader finds it. The loader in pyopencl reads the folder OCL_ICD_VENDORS once, at the first OpenCL call. That call is
made inside `vendors_folder`: a temporary folder that lists the system's drivers and pip's.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flashmem.base.paths import no_temporary_folder, temporary_parent

VARIABLE = "OCL_ICD_VENDORS"
_ROOM_BYTES = 1 << 16
PIP_LIBRARIES = ("libintelocl.so",)


def pip_runtimes() -> tuple[Path, ...]:
    """OpenCL drivers installed by pip: in the environment's `lib`, three folders above site-packages or beside it."""
    folders = [Path(sys.prefix, "lib"), Path(sys.exec_prefix, "lib")]
    for entry in map(Path, sys.path):
        if entry.name in ("site-packages", "dist-packages"):
            folders += [entry, entry.parent.parent]
    found = {}
    for folder in dict.fromkeys(folders):
        for name in PIP_LIBRARIES:
            if name not in found and (folder / name).is_file():
                found[name] = (folder / name).resolve()
    return tuple(found.values())


def system_icds() -> tuple[Path, ...]:
    """The system's own `.icd` files: /etc/OpenCL/vendors, and $PREFIX/etc/OpenCL/vendors on Termux and in conda."""
    folders = [Path("/etc/OpenCL/vendors"), Path(sys.prefix, "etc/OpenCL/vendors")]
    for variable in ("PREFIX", "CONDA_PREFIX"):
        if prefix := os.environ.get(variable):
            folders.append(Path(prefix, "etc/OpenCL/vendors"))
    files = [file for folder in dict.fromkeys(folders) if folder.is_dir() for file in sorted(folder.glob("*.icd"))]
    return tuple(file for file in files if _leads_somewhere(file))


def _leads_somewhere(icd: Path) -> bool:
    """Whether the library that `icd` names can exist: a bare name is left to the dynamic linker."""
    try:
        library = icd.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return False
    return bool(library) and ("/" not in library or Path(library).is_file())


def installed_drivers() -> dict[str, str]:
    """The library of each driver, the system's and pip's, by the name of its file in `vendors_folder`."""
    found = {f"{index:02}-{icd.name}": icd.read_text(encoding="utf-8").strip() for index, icd in enumerate(system_icds())}
    return found | {f"pip-{runtime.stem}.icd": str(runtime) for runtime in pip_runtimes()}


@contextmanager
def vendors_folder(only: str | None = None) -> Iterator[Path | None]:
    """In the body, the OpenCL loader finds pip's drivers in addition to the system's; or `only` one of `installed_drivers`.

    Yields the folder, or None if nothing must change: pip has installed no driver, or the user set OCL_ICD_VENDORS.

    Raises:
        UserError: no temporary folder can be written.
    """
    if os.environ.get(VARIABLE) or (only is None and not pip_runtimes()):
        yield None
        return
    try:
        temporary = tempfile.TemporaryDirectory(prefix="flashmem-icd-", dir=temporary_parent(_ROOM_BYTES))
    except OSError as error:
        raise no_temporary_folder(error) from error
    with temporary as name:
        folder = Path(name)
        try:
            for driver, library in installed_drivers().items():
                if only in (None, driver):
                    (folder / driver).write_text(f"{library}\n", encoding="utf-8")
        except OSError as error:
            raise no_temporary_folder(error) from error
        os.environ[VARIABLE] = name
        try:
            yield folder
        finally:
            del os.environ[VARIABLE]
