"""Folders of the library transformers with weights in safetensors, read as `frontend.decoder.file.DecoderFile`."""
