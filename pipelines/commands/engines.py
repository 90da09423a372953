"""`enginery engines`: a bundle's plans for the GPU here."""

from pathlib import Path

import click

import pipelines
from components.common.artifacts import BundleManifest, load
from pipelines.commands.run import FILE_FIRST, command_for

_FILE = Path(pipelines.__file__).parent / "engines.py"


@click.command(context_settings=FILE_FIRST, add_help_option=False, options_metavar="")
@click.argument("bundle", type=click.Path(path_type=Path), metavar="BUNDLE --data DIR [OPTIONS]")
@click.pass_context
def engines(ctx: click.Context, bundle: Path) -> None:
    """Build and measure TensorRT engines of a bundle for the GPU here.

    BUNDLE is the folder that export wrote in an earlier run, on any machine. Its ONNX files, scales and choices stay
    as they are; engines, report and verdict are new. DIR holds the images that the bundle was made with.

    `enginery engines BUNDLE --help` lists the options.
    """
    if str(bundle) in ("-h", "--help"):
        click.echo(ctx.get_help())
        return
    command = command_for(_FILE)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name == "model":
            parameter.hidden = True  # BUNDLE is it
    if not {"-h", "--help"} & set(ctx.args):
        load(bundle, BundleManifest)
        from components.common.runners.tensorrt_library import load_tensorrt

        load_tensorrt()  # what is missing is said before anything runs
    command.main(args=["--model", str(bundle), *ctx.args], prog_name="enginery engines BUNDLE", standalone_mode=True)
