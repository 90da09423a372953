"""`enginery engines`: a bundle's plans for the GPU here."""

from pathlib import Path

import click

from components.common.contracts.environment import gpus
from components.common.contracts.errors import RuntimeUnavailable
from components.common.contracts.manifests import BundleManifest, load
from enginery.cli.options import PATH
from enginery.cli.run import FILE_FIRST, command_for

_FILE = Path(__file__).resolve().parents[2] / "pipelines" / "engines.py"


@click.command(context_settings=FILE_FIRST, options_metavar="")
@click.argument("bundle", type=PATH, metavar="BUNDLE --data DIR [OPTIONS]")
@click.pass_context
def engines(ctx: click.Context, bundle: Path) -> None:
    """Build and measure TensorRT engines of a bundle for the GPU here.

    BUNDLE is the folder that export wrote in an earlier run, on any machine. Its ONNX files, scales and choices stay
    as they are; engines, report and verdict are new. DIR holds the images that the bundle was made with.

    `enginery engines BUNDLE --help` lists the options.
    """
    if str(bundle).startswith("-"):
        raise click.UsageError(f"BUNDLE comes first, before {bundle}: enginery engines BUNDLE --data DIR", ctx)
    command = command_for(_FILE)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name == "model":
            parameter.hidden = True  # BUNDLE is it
    if not {"-h", "--help"} & set(ctx.args):
        load(bundle, BundleManifest)
        _check_machine(in_containers="--in-containers" in ctx.args)
    command.main(args=["--model", str(bundle), *ctx.args], prog_name="enginery engines BUNDLE", standalone_mode=True)


def _check_machine(*, in_containers: bool) -> None:
    """Say what is missing before anything runs. In containers TensorRT is the image's, and only the GPU is this one's.

    Raises:
        RuntimeUnavailable: no plans can be built here.
    """
    if not in_containers:
        from components.common.runtimes.tensorrt import load_tensorrt

        load_tensorrt()
    elif not gpus():
        raise RuntimeUnavailable(
            "no NVIDIA GPU is found here, and plans are built on the GPU that they are for: run this where one is, "
            "with its driver and a CUDA_VISIBLE_DEVICES that does not hide it",
            code="no-gpu",
        )
