"""The stock kfp command line, with `run FILE.py` added. Started by ./kfp, never installed as a console script."""

import sys


def main() -> None:
    """`run` with a pipeline file is ours; everything else, `run create` too, is KFP's."""
    arguments = sys.argv[1:]
    if len(arguments) >= 2 and arguments[0] == "run" and arguments[1].endswith(".py"):
        from pipelines.cli import main as enginery

        enginery(arguments)
        return
    from kfp.cli.__main__ import main as stock

    sys.argv[0] = "kfp"
    stock()


if __name__ == "__main__":
    main()
