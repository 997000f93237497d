"""Launch order by CP-SAT, for segments of a few layers (`planning/sequence/order.py` states the problem).

Layers are unit intervals that do not overlap. Tensors are intervals from the first layer that touches them to the last. The
peak is the capacity of a cumulative constraint. One worker, a fixed seed and a limit in deterministic time ensure that the same
layers get the same order on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ortools.sat.python import cp_model


def solve(
    needs: Sequence[int],
    tensors: Sequence[tuple[int, int, bool, bool]],
    base: int,
    hint: Sequence[int],
    deterministic_time: float,
) -> tuple[list[int] | None, int, float]:
    """An order of the layers (None if none was found in time), a bound on the peak, and the deterministic time used.

    `needs`: by layer, its predecessors, as bits. `tensors`: bytes, the layers that touch them as bits, whether they are alive
    before all layers, and after all layers. `base`: bytes that are always alive.
    """
    count = len(needs)
    model = cp_model.CpModel()
    at = [model.new_int_var(0, count - 1, f"at{layer}") for layer in range(count)]
    model.add_no_overlap([model.new_fixed_size_interval_var(at[layer], 1, f"run{layer}") for layer in range(count)])
    for layer, before in enumerate(needs):
        for each in _bits(before):
            model.add(at[each] < at[layer])
    unit = math.gcd(*(nbytes for nbytes, *_ in tensors)) or 1
    peak = model.new_int_var(0, sum(nbytes for nbytes, *_ in tensors) // unit, "peak")
    intervals = []
    demands = []
    for index, (nbytes, layers, early, late) in enumerate(tensors):
        first: cp_model.LinearExprT = 0
        end: cp_model.LinearExprT = count
        touching = [at[layer] for layer in _bits(layers)]
        if not early:
            first = touching[0]
            if len(touching) > 1:
                first = model.new_int_var(0, count - 1, f"first{index}")
                model.add_min_equality(first, touching)
        if not late:
            end = model.new_int_var(1, count, f"end{index}")
            model.add_max_equality(end, [each + 1 for each in touching])
        length = model.new_int_var(1, count, f"length{index}")
        intervals.append(model.new_interval_var(first, length, end, f"alive{index}"))
        demands.append(nbytes // unit)
    model.add_cumulative(intervals, demands, peak)
    model.minimize(peak)
    for position, layer in enumerate(hint):
        model.add_hint(at[layer], position)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = deterministic_time
    status = solver.solve(model)
    taken = solver.response_proto.deterministic_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, 0, taken
    order = sorted(range(count), key=lambda layer: solver.value(at[layer]))
    return order, base + unit * math.ceil(solver.best_objective_bound - 1e-6), taken


def _bits(mask: int) -> list[int]:
    return [each for each in range(mask.bit_length()) if mask >> each & 1]
