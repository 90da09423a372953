"""A KFP server, and `enginery submit` and `watch` in this process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

import pytest
from click.testing import CliRunner
from kfp.client import Client

from components.common.contracts.errors import EngineryError
from enginery.cli.commands import cli
from tests.pipelines.running import ROOT, load_once
from tests.serving import serving
from tests.unit.cluster.kfp_api import Cluster


@dataclass
class Done:
    exit_code: int
    text: str  # standard output; what goes wrong is in `error`
    error: EngineryError | None

    @property
    def fault(self) -> tuple[int, str, str]:
        """Exit code, and the error's code and setting."""
        assert self.error is not None, self.text
        assert self.text == ""
        return self.error.exit_code, self.error.code, self.error.setting


Submit = Callable[..., Done]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with serving(Cluster()) as state:
        yield state


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """`submit(endpoint, *options, name, **environment)`; `watch` is the run of `enginery watch` instead."""
    monkeypatch.setattr("enginery.cli.submit.load_pipeline", load_once)
    monkeypatch.setattr("enginery.cluster.watch._SHORTEST_POLL_S", 0.01)
    monkeypatch.setattr(Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "no-context.json"))
    for variable in ("KF_PIPELINES_ENDPOINT", "KFP_COOKIE", "KF_PIPELINES_SA_TOKEN_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))

    def submitted(endpoint: str, *options: str, name: str = "resnet50", watch: str = "", **variables: str) -> Done:
        command = ["watch", watch] if watch else ["submit", str(ROOT / f"pipelines/{name}.py")]
        done = CliRunner(env=variables).invoke(cli, [*command, "--endpoint", endpoint, *options])
        assert isinstance(done.exception, (SystemExit, EngineryError, NoneType)), done.exc_info
        assert done.stderr == ""
        error = done.exception if isinstance(done.exception, EngineryError) else None
        return Done(error.exit_code if error else done.exit_code, done.stdout, error)

    return submitted
