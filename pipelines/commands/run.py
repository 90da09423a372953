"""`enginery run`: a pipeline file on this machine."""

import sys
from pathlib import Path
from typing import Any

import click

from pipelines.parameters import load_pipeline, options_of, resolve_arguments, settings_help

_CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}


@click.command(context_settings=_CONTEXT, add_help_option=False, options_metavar="")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.py [OPTIONS]")
@click.pass_context
def run(ctx: click.Context, file: Path) -> None:
    """Run a pipeline file on this machine.

    The options are the pipeline's own: `enginery run FILE.py --help` lists them.
    """
    if str(file) in ("-h", "--help"):
        click.echo(ctx.get_help())
        return
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


def command_for(file: Path) -> click.Command:
    """The command line of one pipeline file.

    Raises:
        UserError: the file is no pipeline.
    """
    loaded = load_pipeline(file)

    def execute(
        config: Path | None, assignments: tuple[str, ...], summary: Path | None, experiment: str | None, **flags: Any
    ) -> None:
        from pipelines.local import new_console, run_locally

        typed = {name: value for name, value in flags.items() if value is not None}
        arguments = resolve_arguments(loaded, config_file=config, flags=typed, assignments=assignments)
        result = run_locally(
            loaded, arguments, experiment=experiment or loaded.name, console=new_console(), summary_path=summary
        )
        sys.exit(result.exit_code)

    options: list[click.Parameter] = [
        *options_of(loaded),
        click.Option(["--config"], type=click.Path(path_type=Path), metavar="FILE.yaml", help="Inputs and settings."),
        click.Option(
            ["--set", "assignments"],
            multiple=True,
            metavar="STEP.KEY=VALUE",
            help="One setting of one step; repeatable.",
        ),
        click.Option(
            ["--summary"], type=click.Path(path_type=Path), metavar="FILE.json", help="Write the result as JSON."
        ),
        click.Option(["--experiment"], metavar="NAME", help="MLflow experiment.  [default: the pipeline's name]"),
    ]
    command = _PipelineCommand(
        loaded.name,
        params=options,
        callback=execute,
        help=f"{loaded.pipeline.description or ''}\n\nA flag wins over --config, which wins over the default.",
        context_settings={"max_content_width": 110},
    )
    command.sections = settings_help(loaded)
    return command
