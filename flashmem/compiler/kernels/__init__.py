"""Kernel families, each in a folder: its operators, its configs, what they fit and cost, and its lowering to launches.

A family registers itself: operators in `operators.py`, kinds of configs in `configs.py` and `tensor_cores.py`, lowerings in
`lowering.py`.
"""

import flashmem.compiler.operators  # noqa: F401  # declares the operators of all families, which import one another
