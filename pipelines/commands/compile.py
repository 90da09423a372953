"""`enginery compile`: a pipeline file to KFP's YAML."""

from pathlib import Path

import click
from kfp import compiler

from components.common.errors import UserError
from pipelines.parameters import load_pipeline


@click.command()
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.py")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.yaml",
    help="Where to write.  [default: FILE.yaml in this folder]",
)
def compile(file: Path, output: Path | None) -> None:  # the command's name
    """Compile a pipeline file for a cluster; the stock `kfp dsl compile` gives the same."""
    loaded = load_pipeline(file)
    target = output or Path(f"{file.stem}.yaml")
    if target.suffix not in (".yaml", ".yml", ".json"):
        raise UserError(f"--output {target}: KFP takes .yaml or .json")
    try:
        compiler.Compiler().compile(loaded.pipeline, str(target))
    except OSError as error:
        raise UserError(f"can't write {target}: {error.strerror}") from None
    click.echo(f"{target} written. Next: enginery submit {file} --endpoint URL, or upload it in KFP's UI")
