"""Times of operators, alone and in a row."""

from __future__ import annotations

import pytest

from flashmem.profiler.shapes import Matmul
from flashmem.profiler.timing import Stand, generated
from flashmem.runtime.opencl.device import Device
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices


@pytest.mark.parametrize("device", list_devices(), ids=lambda device: device.descriptor_name)
def test_a_run_in_a_row_takes_about_as_long_as_alone(device: Device) -> None:
    made = generated(Matmul(128, 512, 512).graph(), descriptor_for(device))
    with Stand(device) as stand:
        commands = stand.commands(made, stand.build(made))
        alone = stand.time(commands)
        row = stand.time_in_a_row(commands, rows=3)
        assert alone.least / 20 < row < 20 * alone.seconds
        assert stand.time_in_a_row(commands, slow=0.0) > 0, "what is slow is timed alone"
        assert stand.works()
