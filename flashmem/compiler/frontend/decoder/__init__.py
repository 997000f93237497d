"""Decoders of language models, whatever file they are in: `file.DecoderFile` gives hyperparameters by name and tensors by role.

Readers (`frontend.gguf`, `frontend.safetensors`) are such files; `kinds` makes a description of one, and `graph` an ONNX model.
"""
