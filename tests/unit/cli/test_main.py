"""How the process behind the command line ends when a signal meets it while it imports."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
# Sends itself a signal in the middle of an import.
INTERRUPTED_IMPORT = """
import os, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Interrupt())
from enginery.cli.main import main
main({arguments!r})
"""


@pytest.mark.parametrize(("name", "number"), [("click", signal.SIGINT), ("kfp", signal.SIGTERM)])
def test_an_interrupt_during_imports_ends_with_130_and_no_word(name: str, number: signal.Signals) -> None:
    script = INTERRUPTED_IMPORT.format(name=name, number=int(number), arguments=["run", "pipelines/resnet50.py"])
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
