"""Rates of the device, its copies and its kernels, by the profiler's own measurement with a kit of launches.

    python -m flashmem.profiler.phone_kit.rates LAUNCHES.kit DEVICE-NUMBER FOLDER MINUTES

Writes FOLDER/phone.profile.csv.gz, with as many launches as there was time for: none are too few here, unlike for training.
Run again, it continues.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flashmem.base.child_processes import ending_in_a_sentence
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import device_at

from ..kit import Kit
from ..measure import ProfileRequest, measure

NAME = "phone"


def main() -> None:
    """Measure, and write the dataset."""
    launches, number, folder, minutes = sys.argv[1:]
    with ending_in_a_sentence():
        held = Kit(Path(launches))
        device = device_at(int(number))
        request = ProfileRequest(number, Path(folder), float(minutes), NAME, (), True, held.seed)
        found = measure(request, device, descriptor_for(device), held.models(), lambda what, done: None, held.supply)
        found.write(Path(folder), NAME)


if __name__ == "__main__":
    main()
