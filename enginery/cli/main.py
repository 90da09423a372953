"""The process behind the command line `enginery`: how it starts, is interrupted and ends."""

import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

from components.common.contracts.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USER_ERROR, EngineryError, shown

_NO_HOME = "Could not determine home directory."  # as pathlib says it


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors end in one message and an exit code, without a traceback unless --debug."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays nohup
            signal.signal(number, _leave)
    try:
        Path.cwd()
    except OSError:  # before an import asks for it
        _fail("the folder that this was started in is gone; change into another", EXIT_USER_ERROR, "no-current-folder")
    from enginery.cli.commands import cli  # imports take time, in which Ctrl-C is to work, too

    try:
        cli(args=arguments, prog_name="enginery")
    except EngineryError as error:
        _fail(str(error), error.exit_code, error.code)
    except Exception as error:  # the boundary of the process: a full disk, a broken store, or a mistake of ours
        from components.common.process.disk import explain

        if isinstance(error, RuntimeError) and str(error) == _NO_HOME:
            _fail("a path begins with ~ of nobody who has a home here; write it in full", EXIT_USER_ERROR, "no-home")
        if known := explain(error, Path.cwd()):
            _fail(str(known), known.exit_code, known.code)
        _fail(f"{type(error).__name__}: {error} (enginery --debug shows the traceback)", EXIT_FAILURE)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    """No KeyboardInterrupt: libraries swallow it or print it while they are imported, and click ends with 1."""
    sys.exit(EXIT_INTERRUPTED)


def _fail(message: str, exit_code: int, code: str = "") -> NoReturn:
    import click

    if os.environ.get("ENGINERY_DEBUG") == "1":
        traceback.print_exc()
    click.secho("error: ", fg="red", nl=False, err=True)
    click.echo(shown(message), err=True, nl=not code)
    if code:
        click.secho(f" [{code}]", dim=True, err=True)
    sys.exit(exit_code)


def run_this(file: str) -> None:
    """Run a pipeline file as `enginery run` does, for `python pipelines/NAME.py`."""
    main(["run", str(Path(file)), *sys.argv[1:]])


if __name__ == "__main__":
    main()
