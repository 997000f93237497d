"""onnxscript's constant folding, a private module.

Only this module imports it, and `tests/repository/test_undocumented.py` checks that it still exists.

flashmem needs the walk of `FoldConstantsPass` and its partial evaluators of operators. The public functions of onnxscript run
the pass as a whole, without a hook for each node.
"""

from onnxscript.optimizer._constant_folding import FoldConstantsPass as FoldConstantsPass
from onnxscript.optimizer._constant_folding import FoldConstantsResult as FoldConstantsResult
from onnxscript.optimizer._constant_folding import Replacement as Replacement
