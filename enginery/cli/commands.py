"""The verbs of the `enginery` command line, one module each, and the command that holds them."""

import os
from importlib import import_module

import click

_COMMANDS = {
    "run": "Run a pipeline on this machine.",
    "compile": "Compile a pipeline for a cluster.",
    "submit": "Submit a pipeline to a Kubeflow Pipelines server.",
    "watch": "Follow a run on a Kubeflow Pipelines server.",
    "engines": "Build and measure engines of a bundle for the GPU here.",
    "benchmark": "Measure networks by batch size, beside published rows.",
    "advise": "Predict which GPU a model needs, how many, and what limits them.",
    "data": "Write a built-in dataset: digits, textures, shapes, phrases.",
    "runs": "List the runs of this machine.",
    "compare": "Show runs or versions side by side: accuracy, speed, and what differed.",
    "models": "List registered models: versions, aliases, verdicts.",
    "promote": "Point an alias of a registered model to a version.",
    "rollback": "Make the previous champion champion again.",
    "approve": "Sign that a version may run in an environment.",
    "audit": "Show why the champion is it, and every change of an alias.",
    "inspect": "Show what each precision predicts for an image, and where it looks.",
    "video": "Label the frames of videos and live streams: events, timeline, annotated videos.",
    "serve": "Serve a promoted model by Triton, or export its model repository.",
    "release": "Write a registered version into a folder to ship.",
    "verify": "Check a folder that release wrote, offline.",
    "shadow": "Run a challenger beside the served model on live requests, and compare.",
    "deploy": "Write a version into an environment's Helm values, and commit.",
    "push": "Write a release or a model repository into an OCI registry, signed.",
    "fetch": "Fetch an artifact from a store or a registry, checked by digest.",
    "predict": "Ask a model server what it sees on images.",
    "loadtest": "Measure a model server: throughput and latency by request rate.",
    "drift": "Compare what a model server was sent with the model's validation.",
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
        command: click.Command = getattr(import_module(f"enginery.cli.{cmd_name}"), cmd_name.replace("-", "_"))
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

    Try it: enginery data digits digits, then enginery run resnet50 --config digits --data digits
    """
    if debug:
        os.environ["ENGINERY_DEBUG"] = "1"
