"""The command `flashmem`, also as `python -m flashmem`. It imports the command line only when Ctrl-C is taken care of."""

from __future__ import annotations

from flashmem.base import interrupts


def main() -> None:
    """The entry point: exits with 0, 1 (the run failed), 2 (the user has to change something) or 130 (interrupted)."""
    interrupts.watch()
    from flashmem.cli.main import main as command_line

    command_line()


if __name__ == "__main__":
    main()
