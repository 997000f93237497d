"""ONNX files as PyTorch writes them: models with random weights for benchmarks, and the tiny ones of the tests."""
