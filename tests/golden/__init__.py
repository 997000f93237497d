"""Golden files: what the compiler makes of whole models, on every device, as numbers and hashes.

One JSON file for each model. By device, for a CPU and a GPU: the number of kernel launches by family, and the bytes that they
read and write. `hashes`, for small models: one for each stage of the record of each device (`records`). A lost fusion or an
added copy changes a number here, and any other change a hash, without a time measurement. `test_golden.py` compares.

Which kernel, launch or weight differs, and how, says a comparison with another commit, or with records written before:

    python -m tests.golden --compare main
    python -m tests.golden --write FOLDER; python -m tests.golden --compare FOLDER

After an intended change, write the files again and read the difference:

    python -m tests.golden [NAME...]
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
