"""The program: ``pipeline``, or ``python -m pipeline``."""

from typing import NoReturn

from pipeline.machine import interrupts, program

program.begin()  # before the imports, which take a while

from pipeline.commands.main import main  # noqa: E402


def run() -> NoReturn:
    """Runs the command line, and ends the process."""
    interrupts.end_with(main())


if __name__ == "__main__":
    run()
