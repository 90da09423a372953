"""The command line: `enginery`."""

import os
import sys
from importlib import import_module
from pathlib import Path

import click

from components.common.errors import EXIT_FAILURE, EngineryError

_COMMANDS = {
    "run": "Run a pipeline file on this machine.",
    "compile": "Compile a pipeline file for a cluster.",
    "submit": "Submit a pipeline file to a Kubeflow Pipelines server.",
    "data": "Write a built-in data set as folders of JPEG files.",
    "runs": "List the runs of this machine.",
    "compare": "Show runs side by side: accuracy, speed, and what differed.",
    "doctor": "Say what this machine can do, and how to fix what is missing.",
    "gc": "Remove old runs of this machine.",
    "ui": "Open the MLflow UI on this machine's runs.",
}


class _LazyGroup(click.Group):
    """Imports a command when it is used: `enginery --help` need not wait for KFP."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f"pipelines.commands.{cmd_name}"), cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0].endswith(".py"):
            raise click.UsageError(f"to run a pipeline file type: enginery run {args[0]}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="enginery", prog_name="enginery")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """From a folder of labelled images to INT8 engines proved as accurate as the FP32 model.

    Try it: enginery data digits digits, then
    enginery run pipelines/resnet50.py --config pipelines/configs/digits.yaml --data digits
    """
    if debug:
        os.environ["ENGINERY_DEBUG"] = "1"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors end in one message and an exit code, without a traceback unless --debug."""
    try:
        cli(args=arguments, prog_name="enginery")
    except EngineryError as error:
        if os.environ.get("ENGINERY_DEBUG") == "1":
            raise
        _complain(str(error))
        sys.exit(error.exit_code)
    except Exception as error:  # the boundary of the process: a full disk, a broken store, or a mistake of ours
        if os.environ.get("ENGINERY_DEBUG") == "1":
            raise
        _complain(f"{type(error).__name__}: {error} (enginery --debug shows the traceback)")
        sys.exit(EXIT_FAILURE)


def _complain(message: str) -> None:
    click.secho("error: ", fg="red", nl=False, err=True)
    click.echo(message, err=True)


def run_this(file: str) -> None:
    """What `python pipelines/NAME.py` does: `enginery run` on itself."""
    main(["run", str(Path(file)), *sys.argv[1:]])


if __name__ == "__main__":
    main()
