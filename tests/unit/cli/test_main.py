"""The end of the process behind the command line when a signal meets it while it imports, or nothing lets it begin."""

import signal
from pathlib import Path

import pytest

from tests.processes import run_python

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
    done = run_python("-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("PermissionError(13, 'Permission denied', 'out/bundle')", "permission-denied"),
        ("shutil.Error([('a', 'b', \"[Errno 13] Permission denied: 'a'\")])", "permission-denied"),
        ("OSError(28, 'No space left on device', '/')", "no-space"),
        ("OSError(27, 'File too large')", "file-too-large"),
        ("RuntimeError('Error while serializing: I/O error: File too large (os error 27)')", "file-too-large"),
        ("pathlib.Path('~nobody-of-this-name/x').expanduser()", "no-home"),
    ],
)
def test_what_no_command_expects_has_a_code_all_the_same(error: str, code: str) -> None:
    script = (
        "import os, pathlib, shutil, sys; sys.path.insert(0, os.getcwd()); from enginery.cli import commands, main\n"
    )
    script += f"def cli(**_):\n    raise {error}\ncommands.cli = cli\nmain.main([])"
    done = run_python("-c", script)
    assert done.stderr.endswith(f"[{code}]\n"), done.stderr


def test_a_folder_that_is_gone_is_said_so(tmp_path: Path) -> None:
    script = "import os, sys; sys.path.insert(0, os.getcwd()); from enginery.cli.main import main; "
    gone = f"folder = {str(tmp_path / 'gone')!r}; os.mkdir(folder); os.chdir(folder); os.rmdir(folder); main(['runs'])"
    done = run_python("-c", script + gone)
    assert (done.returncode, done.stderr.splitlines()[1:]) == (2, [])
    assert done.stderr.endswith("[no-current-folder]\n")
