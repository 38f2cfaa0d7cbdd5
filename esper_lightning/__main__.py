"""Entry point of `esper-lightning` and `python -m esper_lightning`."""

import signal
import sys
from pathlib import Path

from esper_lightning.cli.front import prepare
from esper_lightning.console import quiet_lightning
from esper_lightning.process import BEFORE_TRAINING, STOP_SIGNALS, exits_on_signals, is_first_process, watched_streams

TOO_LITTLE_MEMORY_TEXT = "failed to map segment"
"""Text in the ImportError of a library that does not fit into the memory which the process may take."""


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    Bad input ends the program with one line on stderr and exit code 2; docs/reference/cli.md has all codes.

    Args:
        args: Arguments of the command line. None: those of the process.
    """
    with watched_streams(silent=not is_first_process()), exits_on_signals(lambda: BEFORE_TRAINING):
        quiet_lightning()
        try:
            working_directory = str(Path.cwd())
        except FileNotFoundError:
            print("error: the current folder was removed; change to another one", file=sys.stderr)
            raise SystemExit(2) from None
        if working_directory not in sys.path:
            sys.path.append(
                working_directory
            )  # so that a config can name the user's own modules; last, so that it hides no package
        prepared = prepare(sys.argv[1:] if args is None else args)
        try:
            from esper_lightning.cli.main import run  # imported late: importing torch and Lightning takes seconds
        except (ImportError, MemoryError) as error:
            if isinstance(error, ImportError) and TOO_LITTLE_MEMORY_TEXT not in str(error):
                raise
            print("error: there is too little memory to load torch; raise the limit (ulimit -v)", file=sys.stderr)
            raise SystemExit(1) from None

        try:
            run(prepared)
        except KeyboardInterrupt:  # raised by code of the user: Ctrl-C itself is a signal
            print(f"error: interrupted {BEFORE_TRAINING}", file=sys.stderr)
            raise SystemExit(130) from None


def run_process() -> None:
    """Run the command line as a program of its own, which a signal also ends in silence while it shuts down."""
    try:
        main()
    finally:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    run_process()
