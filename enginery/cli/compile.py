"""`enginery compile`: a pipeline file to KFP's YAML."""

import shlex
from pathlib import Path

import click
from kfp import compiler

from components.common.contracts.errors import UserError
from enginery.cli.options import PATH, settings_options
from enginery.cluster.resources import on_cluster
from enginery.cluster.settings import ClusterSettings, load_settings
from enginery.local.parameters import PipelineFile, load_pipeline


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
        text = f"--num-nodes: {file} does not train; it has {', '.join(loaded.steps)}"
        raise UserError(text, code="pipeline-does-not-train", setting="--num-nodes")
    return loaded, settings


@click.command(params=[click.Argument(["file"], type=PATH, metavar="PIPELINE"), *settings_options()])
@click.option("--output", type=PATH, metavar="FILE.yaml", help="Where to write.  [default: NAME.yaml in this folder]")
def compile(  # the command's name
    file: Path, output: Path | None, settings: Path | None, num_nodes: int | None
) -> None:
    """Compile a pipeline, by its name or file, for a cluster.

    Without --settings the stock `kfp dsl compile` gives the same.
    """
    loaded = load_for_cluster(file, settings, num_nodes)[0]
    target = output or Path(f"{file.stem}.yaml")
    if target.suffix not in (".yaml", ".yml"):
        message = f"--output {target}: KFP takes .yaml; name a file that ends so"
        raise UserError(message, code="output-not-yaml", setting="--output")
    try:
        compiler.Compiler().compile(loaded.pipeline, str(target))
    except OSError as error:
        text = f"can't write {target}: {error.strerror}"
        raise UserError(text, code="output-unwritable", setting="--output") from None
    given = {"--settings": settings, "--num-nodes": num_nodes}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    submit = shlex.join(["enginery", "submit", str(file), "--endpoint", "URL", *options])
    click.echo(f"{target} written. Next: {submit}, or upload it in KFP's UI")
