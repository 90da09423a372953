"""`enginery run`: a pipeline file on this machine."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from enginery.cli.options import PATH
from enginery.local.parameters import PipelineFile, load_pipeline, options_of, resolve_arguments, settings_help

# Options after PIPELINE are for the command line that the file itself defines.
FILE_FIRST: dict[str, Any] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
}


@click.command(context_settings=FILE_FIRST, options_metavar="")
@click.argument("file", type=PATH, metavar="PIPELINE [OPTIONS]")
@click.pass_context
def run(ctx: click.Context, file: Path) -> None:
    """Run a pipeline on this machine: a ready one by its name, such as resnet50, or a file.

    The options are the pipeline's own: `enginery run PIPELINE --help` lists them.
    """
    if str(file).startswith("-"):
        raise click.UsageError(f"PIPELINE comes first, before {file}: enginery run PIPELINE {file} ...", ctx)
    command_for(file).main(args=ctx.args, prog_name=f"enginery run {file}", standalone_mode=True)


class _PipelineCommand(click.Command):
    """Lists the steps' settings below the options."""

    sections: list[tuple[str, list[tuple[str, str]]]]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write_text("Everything else is set with --set STEP.KEY=VALUE, or in the file of --config:")
        for step, rows in self.sections:
            if rows:
                with formatter.section(f"Settings of {step}"):
                    formatter.write_dl(rows, col_max=34)


def pipeline_command(
    file: PipelineFile, execute: Callable[..., None], options: Sequence[click.Parameter], *, local: bool
) -> click.Command:
    """A command line of a pipeline's own inputs, --config, --set, and further options.

    Args:
        file: the pipeline.
        execute: called with the resolved arguments, and the values of `options` by name.
        options: further ones, of the command.
        local: whether paths among the arguments are this machine's.
    """

    def callback(config: Path | None, assignments: tuple[str, ...], **values: Any) -> None:
        typed = {name: values.pop(name) for name in file.plain_inputs()}
        flags = {name: value for name, value in typed.items() if value is not None}
        arguments = resolve_arguments(file, config_file=config, flags=flags, assignments=assignments, local=local)
        execute(arguments, **values)

    own: list[click.Parameter] = [
        *options_of(file),
        click.Option(["--config"], type=PATH, metavar="FILE.yaml", help="Inputs and settings."),
        click.Option(
            ["--set", "assignments"],
            multiple=True,
            metavar="STEP.KEY=VALUE",
            help="One setting of one step; repeatable.",
        ),
    ]
    command = _PipelineCommand(
        file.name,
        params=[*own, *options],
        callback=callback,
        help=f"{file.pipeline.description or ''}\n\nA flag wins over --set, that over --config, that over the default.",
        context_settings={"max_content_width": 110},
    )
    command.sections = settings_help(file)
    return command


def command_for(path: Path) -> click.Command:
    """The command line of one pipeline file on this machine.

    Raises:
        UserError: the file is no pipeline.
    """
    file = load_pipeline(path)

    def execute(
        arguments: dict[str, Any], summary: Path | None, experiment: str | None, reuse: bool, in_containers: bool
    ) -> None:
        from enginery.local.run import run_locally

        result = run_locally(
            file, arguments, experiment=experiment or "", summary_path=summary, reuse=reuse, in_containers=in_containers
        )
        sys.exit(result.exit_code)

    options = [
        click.Option(["--summary"], type=PATH, metavar="FILE.json", help="Write the result as JSON."),
        click.Option(
            ["--reuse/--no-reuse"],
            default=True,
            help="Reuse finished steps that nothing changed for.  [default: reuse]",
        ),
        click.Option(
            ["--in-containers"],
            is_flag=True,
            help="Run each step in its image by this machine's Docker engine; nothing is reused.",
        ),
        click.Option(["--experiment"], metavar="NAME", help="MLflow experiment.  [default: the pipeline's name]"),
    ]
    return pipeline_command(file, execute, options, local=True)
