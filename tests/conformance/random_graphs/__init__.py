"""Random ONNX graphs, compared with ONNX Runtime.

`graph.draw` makes a whole graph from a source of random numbers: nodes of every family that flashmem lists, all element types,
odd shapes, and data with its limits in it. `values` evaluates each node as it is drawn, so that nothing undefined in ONNX is
asked, and says how exactly an answer can be expected. `judge` compiles, runs and compares. The command is in `__main__`:

    python -m tests.conformance.random_graphs --count 50000 --seed 1 --device pocl --path texture --jobs 4
"""
