"""A search in a process of its own, while this one packs weights. Its module is run as `python -m`, with pickles of its own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from tempfile import TemporaryFile
from types import TracebackType
from typing import Self

from flashmem.base.child_processes import end_with, module_environment, python_module
from flashmem.program.program import Program
from flashmem.request.limits import Limits
from flashmem.schedule.plan import OverlapPlan
from flashmem.target.descriptor import DeviceDescriptor


class SearchProcess:
    """The search for a better plan of `program`. The process ends with the body at the latest, also by Ctrl-C."""

    def __init__(self, program: Program, plan: OverlapPlan, descriptor: DeviceDescriptor, limits: Limits) -> None:
        self._given = (program, plan, descriptor, limits)
        self._asked = TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._answer = TemporaryFile()  # noqa: SIM115
        self._complaint = TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> Self:
        pickle.dump(self._given, self._asked)
        self._asked.seek(0)
        self._process = subprocess.Popen(
            python_module(__name__, str(os.getpid())),
            env=module_environment(),
            stdin=self._asked,
            stdout=self._answer,
            stderr=self._complaint,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the other
        )
        return self

    def result(self, seconds: float | None) -> OverlapPlan:
        """The best plan that the search finds within `seconds` (None: until it ends), or the one that it was given.

        A plan says in a note if the search failed.
        """
        try:
            failed = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            failed = 0
            self._process.kill()
            self._process.wait()
        plan = self._best()
        if not failed:
            return plan
        self._complaint.seek(0)
        said = self._complaint.read().decode(errors="replace").strip().rpartition("\n")[2]
        return replace(plan, notes=(*plan.notes, f"the search for a better plan failed ({said or f'exit code {failed}'})"))

    def _best(self) -> OverlapPlan:
        """The last plan that the process has written whole."""
        plan = self._given[1]
        self._answer.seek(0)
        while True:
            try:
                plan = pickle.load(self._answer)
            except (EOFError, pickle.UnpicklingError):  # the process was ended while it wrote the last one
                return plan

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._asked.close()
        self._answer.close()
        self._complaint.close()


def main() -> None:
    """Search as asked on stdin, with low priority, and write each better plan to stdout."""
    if not end_with(int(sys.argv[1])):
        return
    os.nice(_NICE)
    from flashmem.planning.planner import searched

    program, plan, descriptor, limits = pickle.load(sys.stdin.buffer)

    def write(better: OverlapPlan) -> None:
        pickle.dump(better, sys.stdout.buffer)
        sys.stdout.buffer.flush()

    write(searched(program, plan, descriptor, limits, write))


_NICE = 5

if __name__ == "__main__":
    main()
