"""Adaptive search: compiles a program again in another form if its plan lacks memory or load capacity."""
