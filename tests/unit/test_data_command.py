"""`enginery data` where it can't write: one message with the fix."""

import errno
import os
from pathlib import Path

import pytest

from components.common.contracts.errors import EngineryError, UserError
from enginery.cli.commands import cli
from enginery.cli.data import _writable


@pytest.mark.parametrize("arguments", [("digits",), ("textures", "--num-classes", "2", "--num-train", "2")])
def test_a_place_that_may_not_be_written(arguments: tuple[str, ...]) -> None:
    name, *options = arguments
    with pytest.raises(UserError, match=r"^can't write the data set to /sys/images: .*\. Name a directory"):
        cli(["data", name, "/sys/images", *options], standalone_mode=False)  # closed to root too


def test_a_folder_with_something_else_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match=rf"{tmp_path} is not empty.*Give an empty or a new directory\."):
        cli(["data", "digits", str(tmp_path)], standalone_mode=False)
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
