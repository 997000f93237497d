"""Error of the demo's two networks against ONNX Runtime, for every device, memory path and precision.

    python -m benchmarks.kernels.demo

Prints the largest error of an output as a fraction of its range. Needs the `demo` and `bench` extras.
"""

from __future__ import annotations

import numpy as np

import flashmem
from benchmarks.command import Arguments, run_command
from flashmem.cli.demo import ocr, run
from flashmem.runtime.opencl.devices import descriptor_for
from flashmem.runtime.opencl.discovery import list_devices


def main() -> None:
    """Print the table."""
    Arguments(__doc__).parse_args()
    import onnxruntime

    models, page = ocr.find_models(), np.asarray(run.draw_page())
    detector, recogniser = (onnxruntime.InferenceSession(str(path)) for path in (models.detector, models.recogniser))
    name = detector.get_inputs()[0].name
    [corners, *_] = ocr.find_lines(page, lambda pixels: detector.run(None, {name: pixels})[0])
    cases = (
        ("detector", models.detector, detector, ocr.detector_input(page)[0]),
        ("recogniser", models.recogniser, recogniser, ocr.line_input(page, corners)),
    )
    print("| device | memory path | precision | detector | recogniser |\n|---|---|---|---|---|")
    for device in list_devices():
        for path in descriptor_for(device).memory_paths:
            for precision in ("fp32", "fp16"):
                row = [device.descriptor_name, path, precision]
                for _, model, reference, pixels in cases:
                    name = reference.get_inputs()[0].name
                    bundle = flashmem.compile(
                        model, device=device.descriptor_name, memory_path=path, precision=precision, shapes={name: pixels.shape}
                    )
                    with flashmem.Session(bundle, device=device.descriptor_name) as session:
                        [answer] = session.run(None, {name: pixels})
                    expected = reference.run(None, {name: pixels})[0]
                    row.append(f"{np.abs(answer - expected).max() / np.ptp(expected):.1e}")
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    run_command(main)
