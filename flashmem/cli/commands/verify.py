"""`flashmem verify`: checks what a driver makes of each kernel of a bundle, and prints a table."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashmem.bundle.bundle import Bundle
from flashmem.cli.output.console import emit_json, print_table
from flashmem.runtime.kernels.bundle_checks import check_bundle_kernels
from flashmem.runtime.kernels.checks import CheckedKernel
from flashmem.runtime.kernels.verdicts import Finding
from flashmem.runtime.request.options import device_here


def verify_bundle(path: Path, device: str, *, again: bool, seconds: float | None, as_json: bool) -> bool:
    """Check the kernels of a bundle on a device, for `seconds` at most. Returns whether all that will be used are right.

    Raises:
        UserError: no bundle, or no device that runs it.
        RunError: no process that checks can be started.
    """
    bundle = Bundle.open(path)
    found_device = device_here(device, prefer=bundle.descriptor.name)
    checked = check_bundle_kernels(bundle, found_device, again=again, seconds=seconds)
    usable = all(not each.finding.wrong or _in_its_place(each.finding) for each in checked)
    if as_json:
        kernels = [_as_json(each) for each in checked]
        emit_json({"device": found_device.name, "driver": found_device.key, "ok": usable, "kernels": kernels})
        return usable
    rows = [(each.trial.name, _size(each), _comparison(each), _result(each)) for each in checked]
    print_table(("kernel", "work-items", "elements compared", "result"), rows)
    wrong = {each.trial.name: each.finding for each in checked if each.finding.wrong}
    for name, finding in wrong.items():
        print(f"{name} is miscompiled; {_in_its_place(finding) or 'no build of it is right'}. {finding.wrong}")
    print(f"{len(checked)} launches on {found_device.name}: {len(wrong)} kernels miscompiled")
    return usable


def _in_its_place(finding: Finding) -> str:
    """What is used in the place of a wrong kernel, or ""."""
    if finding.of_chain:
        return "the kernels that it joins are used"
    return "it is used without optimisation" if finding.options is not None else ""


def _result(each: CheckedKernel) -> str:
    if each.finding.wrong:
        return "WRONG"
    if each.known:
        return "right (checked before)"
    return "right" if each.verdict.compared or each.verdict.twin else each.verdict.note or "nothing to compare"


def _comparison(each: CheckedKernel) -> str:
    return "" if each.known else f"{each.verdict.compared} + {each.verdict.twin}"


def _size(each: CheckedKernel) -> str:
    whole, group = each.trial.size
    return " x ".join(map(str, whole)) + (f" in groups of {' x '.join(map(str, group))}" if group else "")


def _as_json(each: CheckedKernel) -> dict[str, Any]:
    return {
        "kernel": each.trial.name, "size": each.trial.size, "known": each.known, "wrong": each.finding.wrong,
        "instead": _in_its_place(each.finding), **{key: value for key, value in asdict(each.verdict).items() if key != "wrong"},
    }  # fmt: skip
