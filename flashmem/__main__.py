"""`python -m flashmem` is the command `flashmem`."""

from flashmem.cli import main

main()
