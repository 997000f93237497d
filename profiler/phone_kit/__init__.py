"""The phone kit: one file that checks and measures flashmem on a phone in ten minutes, and writes one JSON file to return.

`__main__.py` makes the file where the compiler is; `start.py` is its first program on the phone, and `steps.py` what it does.
"""
