"""`enginery compile`: a pipeline file to KFP's YAML."""

from pathlib import Path

import click
from kfp import compiler

from pipelines.parameters import load_pipeline


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.py")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.yaml",
    help="Where to write.  [default: FILE.yaml beside FILE.py's name, here]",
)
def compile(file: Path, output: Path | None) -> None:  # the command's name
    """Compile a pipeline file for a cluster; the stock `kfp dsl compile` gives the same."""
    loaded = load_pipeline(file)
    target = output or Path(f"{file.stem}.yaml")
    compiler.Compiler().compile(loaded.pipeline, str(target))
    click.echo(f"{target} written. Next: enginery submit {file} --endpoint URL, or upload it in KFP's UI")
