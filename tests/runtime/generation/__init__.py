"""Tests of `flashmem.runtime.generation`."""
