"""A real Triton behind a trust policy: it serves what was checked, whatever happens to the folder meanwhile."""

import dataclasses
import time
from pathlib import Path

import pytest
import yaml

from components.common.registry.trust import VERDICT, sign_verdict, signing_key
from enginery.serving.repository import RepositoryConfig, write_repository
from tests.unit.registered import write_keys

from .conftest import NAME, start_serving, wait_until_ready


@pytest.mark.slow
def test_a_repository_that_is_changed_while_it_is_served(triton, source, few_digits: Path, tmp_path: Path) -> None:
    private, public = write_keys(tmp_path / "ci")
    keys = {"ci": {"public_key": public.read_text(), "signs": ["verdict", "model"], "expires": "2999-01-01"}}
    (tmp_path / "trust.yaml").write_text(yaml.safe_dump({"keys": keys}))
    policy = {"ENGINERY_TRUST_POLICY": str(tmp_path / "trust.yaml")}
    statements = {VERDICT: sign_verdict(source.digests, True, signing_key(private))}
    signed = dataclasses.replace(source, statements=statements)
    folder = write_repository(signed, tmp_path / "models", RepositoryConfig(max_wait_s=60), private).path
    image = next((few_digits / "3").iterdir()).read_bytes()

    ran = tmp_path / "ran"
    (tmp_path / "foreign.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    running = start_serving(folder, tmp_path, **policy)
    try:
        while not list(tmp_path.glob("home/serve/*/models")):  # where what was checked gets its name
            assert running.process.poll() is None, running.log.read_text()
            time.sleep(0.01)
        for file in folder.rglob("model.py"):
            file.unlink()
            file.symlink_to(tmp_path / "foreign.py")
        wait_until_ready(running)
        assert running.infer([image]).status == 200
    finally:
        running.process.terminate()
        running.process.wait(600)
    again = start_serving(folder, tmp_path, **policy)
    assert again.process.wait(600) != 0
    assert f"{NAME}_labels/1/model.py" in again.log.read_text()
    assert not ran.exists()
