"""The stock kfp command line, with `run FILE.py` added. Started by ./kfp, never installed as a console script."""

import sys


def main() -> None:
    """`run` with a pipeline file is ours; everything else, `run create` too, is KFP's."""
    arguments = sys.argv[1:]
    if len(arguments) >= 2 and arguments[0] == "run" and arguments[1].endswith(".py"):
        from enginery.cli.main import main as enginery

        enginery(arguments)
        return
    sys.argv[0] = "kfp"
    sys.modules["__main__"].__package__ = None  # or click calls the program "python -m pipelines.kfp"
    if arguments == ["run"] or (arguments[:1] == ["run"] and "--help" in arguments):
        from kfp.cli.run import run  # by itself: the whole command line wants a server, even for help

        print("kfp run FILE.py [OPTIONS] runs a pipeline file on this machine; the rest is for a KFP server.\n")
        run(arguments[1:] or ["--help"], prog_name="kfp run")
    from kfp.cli.__main__ import main as stock

    stock()


if __name__ == "__main__":
    main()
