"""CP-SAT with limits, which Ctrl+C interrupts. OR-tools is imported here: import this module where a search runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ortools.sat.python import cp_model


class _Solver(cp_model.CpSolver):
    """Ctrl-C ends the search. CP-SAT's own handler would keep it from Python, and leave the next one to kill the process."""

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
    """CP-SAT, repeatable as far as its time limit allows."""
    cp = _Solver()
    cp.parameters.max_time_in_seconds = max(seconds, 0.01)
    cp.parameters.num_workers = workers
    cp.parameters.random_seed = 1
    cp.parameters.cp_model_presolve = seconds > 1  # presolve of one window alone takes about as long
    return cp
