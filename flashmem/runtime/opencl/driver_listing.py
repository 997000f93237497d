"""Lists the devices of one driver, in a child process of `driver_table.py`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from flashmem.runtime.opencl.discovery import list_devices, use_driver
from flashmem.runtime.opencl.driver_table import ListedDevice


def main() -> None:
    """Print the devices of the driver that is the argument, as JSON."""
    driver = sys.argv[1]
    use_driver(driver)
    devices = [ListedDevice(driver, each.platform, each.name, each.descriptor_name, each.kind) for each in list_devices()]
    print(json.dumps([asdict(each) for each in devices]), flush=True)


if __name__ == "__main__":
    main()
