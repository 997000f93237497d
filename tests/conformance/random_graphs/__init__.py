"""Random ONNX graphs, compared with ONNX Runtime.

`graph.draw` makes a whole graph from a source of random numbers: nodes of every family that flashmem supports, all element
types, odd shapes, and data with extreme values. `values` evaluates each node when it is drawn, so that no result is undefined
in ONNX, and computes how exact an answer can be. `judge` compiles, runs and compares. The command is in `__main__`:

    python -m tests.conformance.random_graphs --count 50000 --seed 1 --device pocl --path texture --jobs 4
"""
