"""The objective of a name, from the module of that name."""

from __future__ import annotations

from importlib import import_module

from flashmem.base.errors import UserError
from flashmem.planning.objectives.objective import Objective
from flashmem.schedule.objectives import KINDS


def objective_of(name: str) -> Objective:
    """The objective `name`, one of `KINDS`.

    Raises:
        UserError: it is not installed: `flashmem-runtime` has those that a phone plans again for.
    """
    module = f"{__package__}.{name}"
    try:
        objective: Objective = import_module(module).OBJECTIVE
    except ImportError as error:
        what = f"the bundle is planned for {KINDS[name].what}, which is not installed here"
        raise UserError(f"{what}; plan it where the compiler is, or compile the model without --objective") from error
    return objective
