"""Language models in GGUF files, the format of llama.cpp: read as an ONNX model, a tokenizer and a chat template."""
