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


def cp_solver(workers: int, seconds: float) -> cp_model.CpSolver:
    """CP-SAT with a time limit; its result is repeatable unless the limit ends the search."""
    cp = _Solver()
    cp.parameters.max_time_in_seconds = max(seconds, 0.01)
    cp.parameters.num_workers = workers
    cp.parameters.random_seed = 1
    cp.parameters.cp_model_presolve = seconds > 1  # presolve of one window alone needs about that long
    return cp
