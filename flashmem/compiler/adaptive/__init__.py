"""Adaptive search: what a program is compiled again for, once its plan shows what memory or capacity lacks."""
