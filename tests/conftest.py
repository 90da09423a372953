"""Shared by all tests: real digits, small datasets, and an environment without a user's settings."""

import fcntl
import gc
import inspect
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.common.contracts.manifests import Artifact, BundleManifest, DatasetManifest, load
from components.common.contracts.settings import resolve
from components.common.process.steplog import StepLog

# A user's own settings would change what the tests see.
for _name in (
    *("ENGINERY_HOME", "ENGINERY_EVENTS", "ENGINERY_DEBUG", "ENGINERY_PARENT_RUN_ID", "ENGINERY_CACHE", "KFP_TOKEN"),
    *("ENGINERY_IMAGE_REGISTRY", "ENGINERY_IMAGE_TAG", "ENGINERY_TRUST_POLICY", "ENGINERY_SIGNING_KEY"),
    *("ENGINERY_KEY_PASSPHRASE", "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID"),
):
    os.environ.pop(_name, None)

# Triton asks when it is imported; without a GPU (see the Makefile) its kernels run in its interpreter.
if not os.environ.get("CUDA_VISIBLE_DEVICES", shutil.which("nvidia-smi")):
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_xdist_auto_num_workers() -> int:
    """Two for each core: a quarter of the time they wait for processes, files and servers."""
    return 2 * len(os.sched_getaffinity(0))


# One core for each of several test processes, before libraries count them: threads of one would wait for the others'.
if _worker := os.environ.get("PYTEST_XDIST_WORKER"):
    _cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_cores[int(_worker.removeprefix("gw")) % len(_cores)]})

# A background job of a shell ignores Ctrl-C and hang-ups, and so would everything that the tests start in one.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

Dataset = Artifact[DatasetManifest]
Bundle = Artifact[BundleManifest]
Preprocess = Callable[..., Dataset]
# `shared(name, build)`: a folder that `build(folder)` filled, once for all processes of the run. Nobody changes it.
Shared = Callable[[str, Callable[[Path], object]], Path]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="Write the folders golden/ again.")


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> None:
    """Imported modules stay: without this, each full garbage collection goes through some million objects of it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def _no_real_time_process() -> Iterator[None]:
    """A real-time process, and what it starts, takes the processor from all others: servers then count as dead."""
    yield
    assert os.sched_getscheduler(0) not in (os.SCHED_FIFO, os.SCHED_RR)


@pytest.fixture(scope="session", autouse=True)
def _stacks_without_source() -> Iterator[None]:
    """KFP asks `inspect.stack` for its caller's name, which looks for source through every module that is imported."""
    try:
        from kfp.dsl import pipeline_task
    except ImportError:  # as on machines that run tests/gpu alone
        yield
        return

    def stack() -> list[inspect.FrameInfo]:
        return inspect.getouterframes(sys._getframe(1), context=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_task, "inspect", SimpleNamespace(stack=stack))
        yield


@pytest.fixture(scope="session", autouse=True)
def _databases_without_waiting() -> None:
    """SQLite in the tests' own processes waits for no disk: some thousand commits take milliseconds each."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    @event.listens_for(Engine, "connect")
    def set_pragma(connection: Any, _: object) -> None:
        if type(connection).__module__.startswith("sqlite3"):
            connection.execute("PRAGMA synchronous = OFF")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    own = tmp_path_factory.getbasetemp()
    root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    root.mkdir(exist_ok=True)

    def folder_of(name: str, build: Callable[[Path], object]) -> Path:
        folder, complete = root / name, root / f"{name}.complete"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                build(folder)
                complete.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def empty_store(shared: Shared) -> Path:
    """MLflow's tables, made once: that takes seconds."""

    def build(folder: Path) -> None:
        from mlflow import MlflowClient

        MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}").search_experiments(max_results=1)

    return shared("empty_store", build) / "mlflow.db"


@pytest.fixture(scope="session")
def all_digits(shared: Shared) -> Path:
    """The digits dataset: 1,797 images in one tree."""
    from enginery.datasets.digits import write_digits

    return shared("all_digits", lambda folder: write_digits(folder / "all")) / "all"


@pytest.fixture(scope="session")
def few_digits(all_digits: Path, shared: Shared) -> Path:
    """60 digits of each class: 600 images in one tree."""
    return shared("few_digits", lambda folder: copy_digits(all_digits, folder / "few", 60)) / "few"


def copy_digits(digits: Path, target: Path, num_per_class: int) -> None:
    """Copy the first images of each class."""
    for folder in sorted(path for path in digits.iterdir() if path.is_dir()):
        (target / folder.name).mkdir(parents=True)
        for file in sorted(folder.iterdir())[:num_per_class]:
            shutil.copy(file, target / folder.name)


class ThisProcess(Executor):
    """In place of a pool of one process, whose start takes most of a second."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments, **options))
        return done


def run_step(data: Path | str, output: Path, **settings: Any) -> None:
    """The step preprocess, in this process unless num_workers says otherwise."""
    from PIL import Image

    from components.preprocess import packing
    from components.preprocess.config import PreprocessConfig
    from components.preprocess.run import run

    config = resolve(PreprocessConfig, "preprocess", {"data": str(data), "num_workers": 1, **settings})
    with pytest.MonkeyPatch.context() as patch:
        if config.num_workers == 1:
            patch.setattr(packing, "ProcessPoolExecutor", ThisProcess)
            patch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # which packing sets in its process
        run(config, StepLog("preprocess"), output=output)


def preprocess(data: Path | str, output: Path, **settings: Any) -> Dataset:
    """As run_step, of a whole dataset."""
    run_step(data, output, **settings)
    return load(output, DatasetManifest)


@pytest.fixture(scope="session")
def run_preprocess() -> Preprocess:
    """`preprocess`, as a fixture."""
    return preprocess


@pytest.fixture(scope="session")
def digits_dataset(few_digits: Path, shared: Shared) -> Dataset:
    """The 600 digits, preprocessed: 480 to train, 120 to validate."""
    folder = shared("digits_dataset", lambda folder: preprocess(few_digits, folder / "dataset"))
    return load(folder / "dataset", DatasetManifest)
