"""What the tests share: real digits, small data sets, and an environment without a user's settings."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import Artifact, DatasetManifest, load
from components.common.settings import resolve
from components.common.steplog import StepLog

# What a user may have set would change what the tests see.
for _name in ("ENGINERY_HOME", "ENGINERY_EVENTS", "ENGINERY_DEBUG", "ENGINERY_PARENT_RUN_ID", "ENGINERY_CACHE"):
    os.environ.pop(_name, None)
for _name in ("ENGINERY_IMAGE_REGISTRY", "ENGINERY_IMAGE_TAG", "KFP_TOKEN"):
    os.environ.pop(_name, None)
for _name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"):
    os.environ.pop(_name, None)

# A background job of a shell ignores Ctrl-C and hang-ups, and so would everything that the tests start in one.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

Preprocess = Callable[..., Artifact[DatasetManifest]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="Write the folders golden/ anew.")


@pytest.fixture(scope="session")
def all_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits data set: 1,797 images in one tree."""
    from pipelines.datasets.digits import write_digits

    return write_digits(tmp_path_factory.mktemp("digits") / "all").directory


@pytest.fixture(scope="session")
def few_digits(all_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 digits of each class: 600 images in one tree."""
    root = tmp_path_factory.mktemp("digits") / "few"
    for folder in sorted(path for path in all_digits.iterdir() if path.is_dir()):
        (root / folder.name).mkdir(parents=True)
        for file in sorted(folder.iterdir())[:60]:
            shutil.copy(file, root / folder.name)
    return root


@pytest.fixture(scope="session")
def run_preprocess() -> Preprocess:
    """`run_preprocess(data, output, **settings)`: the step itself, one worker unless told otherwise."""
    from components.preprocess.config import PreprocessConfig
    from components.preprocess.run import run

    def preprocess(data: Path, output: Path, **settings: Any) -> Artifact[DatasetManifest]:
        config = resolve(PreprocessConfig, "preprocess", {"data": str(data), "num_workers": 1, **settings})
        run(config, StepLog("preprocess"), output=output)
        return load(output, DatasetManifest)

    return preprocess


@pytest.fixture(scope="session")
def digits_dataset(
    few_digits: Path, run_preprocess: Preprocess, tmp_path_factory: pytest.TempPathFactory
) -> Artifact[DatasetManifest]:
    """The 600 digits, preprocessed: 480 to train, 120 to validate."""
    return run_preprocess(few_digits, tmp_path_factory.mktemp("digits") / "dataset")
