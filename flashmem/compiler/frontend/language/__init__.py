"""Language models in ONNX: decoders get a cache of fixed length, and tokenizer and chat template are read."""
