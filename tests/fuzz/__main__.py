"""`python -m tests.fuzz TARGET`: damaged bytes for one kind of parser; each case that goes wrong is named."""

import sys

import click

from tests.fuzz import images, parsers, releases, shards
from tests.fuzz.running import run_cases

TARGETS = {"images": images, "parsers": parsers, "releases": releases, "shards": shards}


@click.command()
@click.argument("target", type=click.Choice([*TARGETS]))
@click.option("--num-cases", default=10000, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(target: str, num_cases: int, seed: int) -> None:
    num_wrong = 0
    for number, what in run_cases(num_cases, seed, TARGETS[target].check_batch, TARGETS[target].BATCH):
        num_wrong += 1
        print(f"case {number}: {what}", flush=True)
    print(f"{num_cases} cases, {num_wrong} wrong")
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
