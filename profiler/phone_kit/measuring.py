"""Runs all steps of the phone kit and writes their record.

    python -m flashmem.profiler.phone_kit.measuring KIT-FOLDER [--device NAME] [--minutes 10] [-o FILE] [--fresh]

A step that fails or crashes is recorded as such and the others go on. The record is one JSON file, written when all steps have
ended: whole or not at all. After an interruption the next call continues with the step after the interrupted one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from flashmem.base.errors import UserError
from flashmem.base.files import check_target, written_whole
from flashmem.base.interrupts import unwinding
from flashmem.base.streams import exit_codes, prepare_streams, say
from flashmem.base.version import __version__

from .contents import VERSION, Contents
from .steps import MINUTES, STEPS, Chosen, KitRun, StepFailedError

FORMAT = "flashmem phone kit"
_LEAST_MINUTES = 0.5


def run_steps(kit: KitRun, steps: dict[str, Callable[[KitRun], Any]], *, fresh: bool = False) -> dict[str, Any]:
    """Run `steps` and return the record. Their state is kept in the work folder until `finish`.

    Only the doctor's device makes the other steps possible: without one they are not begun.
    """
    state_file = kit.work / "state.json"
    state = {} if fresh else _kept(state_file, kit)
    records: dict[str, Any] = state.get("steps", {})
    if state.get("device"):
        kit.device = Chosen(**state["device"])

    def keep(begun: str = "") -> None:
        data = {"kit": kit.contents.about["made"], "wanted": kit.wanted, "steps": records, "begun": begun}
        with written_whole(state_file) as file:
            file.write(json.dumps(data | {"device": kit.device and asdict(kit.device)}).encode())

    interrupted = state.get("begun", "")
    for number, (name, step) in enumerate(steps.items(), start=1):
        if name in records:
            continue
        if name == interrupted and name != "doctor":
            records[name] = _record(False, "the kit was interrupted in this step", 0.0, None)
            continue
        if name != "doctor" and kit.device is None:
            records[name] = _record(False, "there is no device", 0.0, None)
            continue
        say(f"{number} of {len(steps)}: {name}")
        keep(name)
        begun = monotonic()
        try:
            if kit.left <= 0:
                raise StepFailedError("no time was left")
            result = step(kit)
            records[name] = _record(True, "", monotonic() - begun, result)
        except StepFailedError as error:
            records[name] = _record(False, str(error), monotonic() - begun, error.result)
        except (OSError, ValueError, KeyError, UserError) as error:
            records[name] = _record(False, f"{type(error).__name__}: {error}", monotonic() - begun, None)
        if not records[name]["ok"]:
            say(f"   {records[name]['said']}")
        keep()
    return {
        "format": FORMAT,
        "version": VERSION,
        "flashmem": __version__,
        "kit": kit.contents.about["made"],
        "date": datetime.now(UTC).date().isoformat(),
        "device": kit.device and asdict(kit.device),
        "steps": records,
    }


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Write the record atomically."""
    with written_whole(path) as file:
        file.write(json.dumps(record, indent=1).encode())


def _record(ok: bool, said: str, seconds: float, result: Any) -> dict[str, Any]:
    return {"ok": ok, "said": said, "seconds": round(seconds, 2), "result": result}


def _kept(file: Path, kit: KitRun) -> dict[str, Any]:
    """The state that an interrupted call of the same kit left; {} without one."""
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    same = isinstance(state, dict) and (state.get("kit"), state.get("wanted")) == (kit.contents.about["made"], kit.wanted)
    return state if same else {}


def main() -> None:
    """Run the kit; exits with 1 if a step failed, after the record is written."""
    prepare_streams()
    parser = argparse.ArgumentParser("flashmem-phone-kit", description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", default="auto", metavar="NAME", help="number or descriptor of a device")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all steps together")
    parser.add_argument("-o", "--output", type=Path, default=Path("flashmem-phone.json"), metavar="FILE", help="the record")
    parser.add_argument("--fresh", action="store_true", help="start again instead of continuing")
    given = parser.parse_args()
    with exit_codes(), unwinding():
        if not given.minutes >= _LEAST_MINUTES:
            raise UserError(f"--minutes {given.minutes:g} is too short; give at least {_LEAST_MINUTES:g}")
        check_target(given.output, "--output")
        work = given.folder / "work"
        work.mkdir(exist_ok=True)
        kit = KitRun(Contents.open(given.folder), work, monotonic() + 60 * given.minutes, given.minutes / MINUTES, given.device)
        record = run_steps(kit, STEPS, fresh=given.fresh)
        write_record(given.output, record)
        shutil.rmtree(work)
        failed = [name for name, each in record["steps"].items() if not each["ok"]]
        say(f"failed: {', '.join(failed)}" if failed else "every step succeeded")
        print(given.output)
        sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
