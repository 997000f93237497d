"""Fit the rates of a device descriptor to published latencies: least squares of logarithms.

Rates without a measurement are assumptions (`[sources]` of a descriptor). Each is scaled by a separate factor. The fit
minimises the squared logarithm of predicted over published seconds and, with a small weight, of the factors. So an assumption
that does not influence the rows keeps its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flashmem.target.descriptor import DeviceDescriptor

RATES = ("gemm_flops", "conv_flops", "memory_bandwidth", "launch_seconds", "disk_bandwidth", "session_seconds")
"""The rates that can be fitted."""

_OFF_BY = math.log(1.3)
"""Expected deviation of a row at the best fit."""

_ASSUMED_WITHIN = math.log(3)
"""Expected deviation of an assumption."""

_STEP, _ROUNDS, _HALVINGS = 0.1, 8, 4


def scaled(descriptor: DeviceDescriptor, factors: Mapping[str, float]) -> DeviceDescriptor:
    """The descriptor with rates multiplied by `factors`; a missing rate for convolutions is that of products."""
    rates = descriptor.rates
    stated = {name: getattr(rates, name) for name in factors}
    if "conv_flops" in stated:
        stated["conv_flops"] = rates.flops_of("conv")
    return replace(descriptor, rates=replace(rates, **{name: value * factors[name] for name, value in stated.items()}))


def fitted(
    free: Sequence[str], predict: Callable[[Mapping[str, float]], Sequence[float]], published: Sequence[float]
) -> dict[str, float]:
    """The factors of the rates `free` for which `predict(factors)` is closest to `published`, by Gauss-Newton iteration."""
    target = np.log(published)

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        found = predict(dict(zip(free, np.exp(logs).tolist(), strict=True)))
        return np.concatenate([(np.log(found) - target) / _OFF_BY, logs / _ASSUMED_WITHIN])

    logs = np.zeros(len(free))
    now = residuals(logs)
    for _ in range(_ROUNDS):
        slopes = np.stack([(residuals(logs + _STEP * unit) - now) / _STEP for unit in np.eye(len(free))], 1)
        step = -np.linalg.lstsq(slopes, now, rcond=None)[0]
        for _ in range(_HALVINGS):
            after = residuals(logs + step)
            if after @ after < now @ now:
                break
            step /= 2
        else:
            break
        gained = now @ now - after @ after
        logs, now = logs + step, after
        if gained < 1e-3 * (now @ now):
            break
    return dict(zip(free, np.exp(logs).tolist(), strict=True))
