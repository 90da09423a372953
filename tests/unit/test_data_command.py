"""`enginery data` where it can't write: one message with the fix."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.common.errors import EngineryError, UserError
from pipelines.commands.data import _writable

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arguments", [("digits",), ("textures", "--num-classes", "2", "--num-train", "2")])
def test_a_place_that_may_not_be_written(arguments: tuple[str, ...]) -> None:
    name, *options = arguments
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", "data", name, "/sys/images", *options],  # closed to root too
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: can't write the data set to /sys/images: ")
    assert line.endswith(". Name a directory that you may write")


def test_a_folder_with_something_else_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    done = subprocess.run(
        [sys.executable, "-m", "pipelines.cli", "data", "digits", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"{tmp_path} is not empty" in done.stderr
    assert "Give an empty or a new directory." in done.stderr
    assert os.listdir(tmp_path) == ["mine.txt"]


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (errno.ENOSPC, EngineryError, "no space left .* give the same command again, which continues"),
        (errno.EACCES, UserError, r"Permission denied\. Name a directory that you may write"),
    ],
)
def test_a_full_disk_is_a_failure_and_other_obstacles_are_the_users(
    tmp_path: Path, number: int, error: type[EngineryError], message: str
) -> None:
    with pytest.raises(EngineryError, match=message) as caught, _writable(tmp_path):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is error
