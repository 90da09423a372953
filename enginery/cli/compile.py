"""`enginery compile`: a pipeline file to KFP's YAML."""

from pathlib import Path

import click
from kfp import compiler

from components.common.contracts.errors import UserError
from enginery.cluster.resources import on_cluster
from enginery.cluster.settings import ClusterSettings, load_settings
from enginery.local.parameters import PipelineFile, load_pipeline

SETTINGS_OPTION = click.option(
    "--settings",
    type=click.Path(path_type=Path),
    metavar="FILE.yaml",
    help="What the cluster gives the steps: images, GPUs, volumes, secrets (docs/submit.md).",
)
NODES_OPTION = click.option(
    "--num-nodes", type=click.IntRange(min=1), metavar="N", help="Nodes to train on, instead of the settings' number."
)


def load_for_cluster(file: Path, path: Path | None, num_nodes: int | None) -> tuple[PipelineFile, ClusterSettings]:
    """A pipeline file with what a settings file gives its steps.

    Raises:
        UserError: the file is no pipeline, or the settings can't be.
    """
    if path is None and num_nodes is None:
        return load_pipeline(file), ClusterSettings()
    settings = load_settings(path, num_nodes=num_nodes)
    with on_cluster(settings):
        loaded = load_pipeline(file)
    if num_nodes is not None and "train" not in loaded.steps:
        raise UserError(f"--num-nodes: {file} does not train; it has {', '.join(loaded.steps)}")
    return loaded, settings


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.py")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.yaml",
    help="Where to write.  [default: FILE.yaml in this folder]",
)
@SETTINGS_OPTION
@NODES_OPTION
def compile(  # the command's name
    file: Path, output: Path | None, settings: Path | None, num_nodes: int | None
) -> None:
    """Compile a pipeline file for a cluster; without --settings the stock `kfp dsl compile` gives the same."""
    loaded = load_for_cluster(file, settings, num_nodes)[0]
    target = output or Path(f"{file.stem}.yaml")
    if target.suffix not in (".yaml", ".yml", ".json"):
        raise UserError(f"--output {target}: KFP takes .yaml or .json")
    try:
        compiler.Compiler().compile(loaded.pipeline, str(target))
    except OSError as error:
        raise UserError(f"can't write {target}: {error.strerror}") from None
    click.echo(f"{target} written. Next: enginery submit {file} --endpoint URL, or upload it in KFP's UI")
