"""CP-SAT with limits, which Ctrl+C interrupts. It imports OR-tools: import this module only where a search runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ortools.sat.python import cp_model


class _Solver(cp_model.CpSolver):
    """A solver that Ctrl-C stops. CP-SAT's own handler hides the first one from Python, and the next one kills the process."""

    def solve(
        self, model: cp_model.CpModel, solution_callback: cp_model.CpSolverSolutionCallback | None = None
    ) -> cp_model.CpSolverStatus:
        self.parameters.catch_sigint_signal = False
        with ThreadPoolExecutor(1) as thread:
            search = thread.submit(super().solve, model, solution_callback)
            try:
                return search.result()
            except BaseException:
                self.stop_search()
                raise


def cp_solver(workers: int, seconds: float, work: float | None = None) -> cp_model.CpSolver:
    """CP-SAT with a limit of its own `work` (by default what it does in `seconds` on a slow processor), and one of seconds.

    Its threads take turns in a fixed order, so a result is repeatable unless the limit of seconds ends the search.
    """
    cp = _Solver()
    cp.parameters.max_deterministic_time = max(WORK_OF_A_SECOND * seconds if work is None else work, 0.001)
    cp.parameters.max_time_in_seconds = max(seconds, 0.01)
    cp.parameters.num_workers = workers
    cp.parameters.interleave_search = workers > 1
    cp.parameters.random_seed = 1
    cp.parameters.cp_model_presolve = seconds > 1  # presolve of one window alone needs about that long
    return cp


WORK_OF_A_SECOND = 0.2
"""The work (deterministic time of CP-SAT) that a busy processor does in a second."""
