"""models, promote, rollback, audit, and compare of versions: what they show, change and refuse."""

import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pydantic import ValidationError

from components.common.contracts.errors import EngineryError, GateFailed, UserError
from components.common.registry.alias_changes import Proposal, change_aliases
from components.common.registry.audit_log import AuditLog
from components.common.registry.model_registry import PARTS, Registry
from components.common.registry.version_evaluation import load_standing
from components.promote.config import PromoteConfig
from enginery.cli.commands import cli
from enginery.registry.models import version_summary

from .chains import make_and_promote, make_chain, promote_chain

ROOT = Path(__file__).resolve().parents[3]


def enginery(*arguments: str) -> Result:
    done = CliRunner(env={"COLUMNS": "200"}).invoke(cli, arguments)
    if isinstance(done.exception, EngineryError):
        raise done.exception
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def register_forged(registry: Registry, folder: Path, *, passed: bool = True) -> str:
    """A version of 99 % that no `promote` registered, by the API of MLflow."""
    paths = make_chain(folder, 99, passed=passed)
    run = registry.client.create_run(registry.client.create_experiment(f"of {folder.name}"))
    for part in ("bundle", "report", "verdict"):
        registry.client.log_artifacts(run.info.run_id, str(paths[part]), f"model/{part}")
    tags = load_standing(paths["report"], paths["verdict"]).tags
    return registry.create_version("m", run.info.run_id, tags)


def register_failed(registry: Registry, folder: Path) -> str:
    """A version whose gate did not pass, with an entry in the log: who can write there can make one up."""
    number = register_forged(registry, folder, passed=False)
    digests = load_standing(folder / "report", folder / "verdict").digests
    entry = Proposal(kind="promote", aliases={"forged": number}, why="x", digests=digests)
    change_aliases(registry, "m", lambda situation: entry)
    return number


def test_models_lists_versions(three: str) -> None:
    text = enginery("models").output
    assert "@champion" in text
    assert "60.00" in text
    rows = json.loads(enginery("models", "m", "--json").output)
    assert [(row["version"], row["aliases"], row["top1_pct"]) for row in rows] == [
        ("3", ["champion", "candidate"], 60.0),
        ("2", [], 40.0),
        ("1", [], 50.0),
    ]
    assert {(row["verdict"], row["precision"]) for row in rows} == {("pass, not proved", "int8")}


def test_rollback_goes_further_back_each_time(three: str, registry: Registry) -> None:
    done = enginery("rollback", "m", "--why", "it confuses 3 and 8")
    assert "m@champion: version 3 -> 1" in done.output
    assert registry.aliases("m")["champion"] == "1"
    with pytest.raises(UserError, match="m has no champion before version 1: the audit log knows of none"):
        enginery("rollback", "m")
    last = AuditLog(registry.client, "m").read()[-1]
    assert (last.change.kind, last.change.why) == ("rollback", "it confuses 3 and 8")


def test_a_bundle_that_was_rolled_back_does_not_come_back(
    three: str, registry: Registry, made_once: Path, tmp_path: Path
) -> None:
    enginery("rollback", "m", "--why", "it confuses 3 and 8")
    same = {name: made_once.parent / "c-060" / name for name in ("bundle", "report", "verdict", "dataset")}
    told = promote_chain(three, same, tmp_path / "again")
    assert "as @candidate: this very bundle was champion as version 3, and was rolled back on" in told
    assert "(it confuses 3 and 8)" in told
    assert registry.aliases("m") == {"candidate": "4", "champion": "1"}
    enginery("promote", "m", "4", "--why", "3 and 8 are told apart now")
    assert registry.aliases("m")["champion"] == "4"


def test_rollback_to_a_version_that_was_deleted(three: str, registry: Registry) -> None:
    registry.client.delete_model_version("m", "1")
    with pytest.raises(UserError, match="version 1, the champion of m before version 3, was deleted"):
        enginery("rollback", "m")
    assert registry.aliases("m")["champion"] == "3"


def test_rollback_where_the_champion_was_deleted(three: str, registry: Registry) -> None:
    registry.client.delete_model_version("m", "3")
    assert "problem" in enginery("audit", "m").output
    enginery("rollback", "m")
    assert registry.aliases("m") == {"champion": "1"}
    assert [entry.change.kind for entry in AuditLog(registry.client, "m").read()][-2:] == ["promote", "rollback"]


def test_rollback_to_files_that_were_changed(three: str, registry: Registry) -> None:
    with registry.files(registry.version("m", "1"), "bundle", "int8.onnx") as file:
        before = file.read_bytes()
        file.write_bytes(before[:-1] + b"!")
        with pytest.raises(EngineryError, match=r"int8.onnx was changed after it was sealed"):
            enginery("rollback", "m")
        with pytest.raises(EngineryError, match=r"int8.onnx was changed after it was sealed"):
            enginery("promote", "m", "1", "--why", "x", "--force")
        file.write_bytes(before)
    assert registry.aliases("m")["champion"] == "3"


def test_by_hand_a_worse_one_is_refused_or_forced(three: str, registry: Registry) -> None:
    with pytest.raises(GateFailed, match=r"2 does not become champion: it is worse: top-1 40.00 %") as refused:
        enginery("promote", "m", "2", "--to", "champion", "--why", "smaller")
    assert refused.value.exit_code == 3
    assert registry.aliases("m")["champion"] == "3"
    done = enginery("promote", "m", "2", "--to", "champion", "--why", "smaller", "--force")
    assert "m@champion: version 3 -> 2 forced, overruling: it is worse" in done.output
    last = AuditLog(registry.client, "m").read()[-1].change
    assert (last.forced, last.why, last.kind) == (True, "smaller", "manual")
    assert last.overruled.startswith("it is worse: top-1 40.00 %")
    assert "forced" in enginery("audit", "m").output


def test_by_hand_one_that_did_not_pass_is_refused_even_forced(three: str, registry: Registry, tmp_path: Path) -> None:
    number = register_failed(registry, tmp_path / "failed")
    for more in ((), ("--force",), ("--to", "staging")):
        with pytest.raises(GateFailed, match=f"m version {number} did not pass its gate: top-1"):
            enginery("promote", "m", number, "--why", "we need it", *more)
    assert registry.aliases("m")["champion"] == "3"


def test_a_digest_taken_off_does_not_open_the_door(three: str, registry: Registry) -> None:
    enginery("rollback", "m")
    registry.client.delete_model_version_tag("m", "3", "bundle_digest")
    with pytest.raises(EngineryError, match="its tag bundle_digest says nothing"):
        enginery("promote", "m", "3", "--why", "x", "--force")


def test_files_and_tags_of_another_model_under_the_name_of_a_champion(
    three: str, registry: Registry, tmp_path: Path
) -> None:
    """All three artifacts and every tag replaced by those of another model: only the log knows."""
    other = make_chain(tmp_path / "other", 99)
    version = registry.version("m", "3")
    tags = load_standing(other["report"], other["verdict"]).tags
    with ExitStack() as stack:
        for part in PARTS:
            folder = stack.enter_context(registry.files(version, part))
            stack.callback(shutil.copytree, shutil.copytree(folder, tmp_path / part), folder, dirs_exist_ok=True)
            shutil.copytree(other[part], folder, dirs_exist_ok=True)
        for key, value in tags.items():
            registry.client.set_model_version_tag("m", "3", key, value)
        done = enginery("audit", "m")
        assert done.exit_code == 1
        assert "the bundle that lies in the registry is not the one that was promoted as m version 3" in done.output
        for command in (
            ("promote", "m", "3", "--to", "staging", "--why", "x", "--force"),
            ("release", str(tmp_path / "out"), "m/3"),
        ):
            with pytest.raises(EngineryError, match=r"was promoted as m version 3: .* of the audit log says"):
                enginery(*command)


def test_a_version_without_any_tag_is_known_to_the_log(three: str, registry: Registry) -> None:
    for key in registry.version("m", "1").tags:
        registry.client.delete_model_version_tag("m", "1", key)
    with pytest.raises(EngineryError, match="m version 1 has no tag of enginery's"):
        enginery("promote", "m", "1", "--why", "x", "--force")
    with pytest.raises(EngineryError, match="m version 1 has no tag of enginery's"):
        enginery("rollback", "m")


def test_by_hand_one_of_unknown_origin(three: str, registry: Registry, tmp_path: Path) -> None:
    registry.client.create_model_version("m", str(tmp_path))
    for alias in ("champion", "staging"):
        with pytest.raises(EngineryError, match="m version 4 has no tag of enginery's"):
            enginery("promote", "m", "4", "--to", alias, "--why", "x", "--force")


def test_by_hand_measured_on_other_images(three: str, registry: Registry, tmp_path: Path) -> None:
    make_and_promote(three, tmp_path, "d-090", split="two")
    with pytest.raises(GateFailed, match="it was measured on other images than the champion, version 3"):
        enginery("promote", "m", "4", "--why", "x")


def test_forced_is_only_what_was_refused(three: str, registry: Registry) -> None:
    enginery("rollback", "m")
    enginery("promote", "m", "3", "--why", "back again", "--force")
    assert AuditLog(registry.client, "m").read()[-1].change.forced is False


def test_audit_shows_the_chain(three: str, registry: Registry) -> None:
    done = enginery("audit", "m")
    assert done.exit_code == 0, done.output
    found = json.loads(enginery("audit", "m", "--json").output)
    tags = registry.version("m", "3").tags
    chain = {link["name"]: link["digest"] for link in found["chain"]}
    assert list(chain) == ["data set", "validation split", "checkpoint", "bundle", "report", "verdict", "version"]
    assert chain["data set"] == tags["dataset_digest"]
    assert chain["checkpoint"] == "sha256:" + "c" * 64
    assert [chain[part] for part in ("bundle", "report", "verdict")] == [
        tags[f"{part}_digest"] for part in ("bundle", "report", "verdict")
    ]
    assert chain["version"] == "3"
    assert [entry["number"] for entry in found["entries"]] == [1, 2, 3]
    assert found["problems"] == []


def test_audit_tells_what_does_not_fit(three: str, registry: Registry) -> None:
    registry.client.set_model_version_tag("m", "3", "bundle_digest", "sha256:0")
    registry.client.set_registered_model_alias("m", "staging", "2")
    done = enginery("audit", "m")
    assert done.exit_code == 1
    assert "and its tag says sha256:0" in done.output
    assert "@staging is version 2, by the log it is not set: it was changed without enginery" in done.output


def test_audit_says_what_it_read(three: str, registry: Registry, tmp_path: Path) -> None:
    with registry.files(registry.version("m", "3"), "bundle", "int8.onnx") as model:
        before = model.read_bytes()
        model.write_bytes(bytes(len(before)))
        try:
            done = enginery("audit", "m")
            assert done.exit_code == 0
            assert "the manifests of the champion, not its other files (--files reads those, too)" in done.output
            done = enginery("audit", "m", "--files")
            assert done.exit_code == 1
            assert "int8.onnx was changed after it was sealed" in done.output
        finally:
            model.write_bytes(before)
    done = enginery("audit", "m", "--files")
    assert done.exit_code == 0
    assert "checked: that the log is whole and explains every alias; every file of the champion" in done.output
    assert json.loads(enginery("audit", "m", "--files", "--json").stdout)["files_checked"] is True


def test_compare_of_versions(three: str) -> None:
    for first, second in (("m@champion", "m/1"), ("m:3", "m:1")):
        found = json.loads(enginery("compare", first, second, "--json").output)
        assert [run["run_id"] for run in found["runs"]] == ["m/3", "m/1"]
        assert [run["rows"]["int8"]["top1_pct"] for run in found["runs"]] == [60.0, 50.0]
        assert [run["rows"]["int8"]["verdict"] for run in found["runs"]] == ["pass, not proved"] * 2
    text = enginery("compare", "m@champion", "m/1").output
    assert "A  m/3" in text
    with pytest.raises(UserError, match="name the same run twice"):
        enginery("compare", "m@champion", "m/3")


def test_compare_of_a_version_and_a_run(three: str, registry: Registry, tmp_path: Path) -> None:
    run = version_summary(registry, "m/1").model_copy(update={"run_id": "run-1", "arguments": {"epochs": 2}})
    (tmp_path / "summary.json").write_text(run.model_dump_json())
    found = json.loads(enginery("compare", "m/3", str(tmp_path / "summary.json"), "--json").output)
    assert found["arguments"] == {}
    assert "arguments are not compared: a version has the settings of its steps" in found["warnings"][-1]
    text = enginery("compare", "m/3", str(tmp_path / "summary.json")).output
    assert "the same in all: arguments" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("models", "nix"), "there is no registered model 'nix' in MLflow at sqlite:.*; there are m"),
        (("audit", "nix"), "there is no registered model 'nix'"),
        (("rollback", "nix"), "there is no registered model 'nix'"),
        (("promote", "nix", "1", "--why", "x"), "there is no registered model 'nix'"),
        (("promote", "m", "99", "--why", "x"), "m has no version 99, or it was deleted; there are 3, 2, 1"),
        (("promote", "m", "\N{SUPERSCRIPT TWO}", "--why", "x"), "a version is a number, such as 3; got"),
        (("promote", "m", "03", "--why", "x"), "m@champion is version 3 already"),
        (("promote", "a/b", "1", "--why", "x"), "there is no registered model 'a/b'"),
        (("models", "a'b\"c"), "there is no registered model"),
        (("promote", "m", "three", "--why", "x"), "a version is a number, such as 3; got 'three'"),
        (("promote", "m", "3", "--why", "x"), "m@champion is version 3 already"),
        (("compare", "m@nix", "m/1"), r"m has no alias nix; it has @candidate \(version 3\), @champion \(version 3\)"),
    ],
)
def test_what_is_not_there(three: str, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        enginery(*arguments)


def test_a_version_with_a_zero_before_it(three: str, registry: Registry) -> None:
    """An alias shows 1 where 01 was asked for: that never became true, so the change was made again for ever."""
    enginery("promote", "m", "01", "--to", "staging", "--why", "x")
    assert registry.aliases("m")["staging"] == "1"
    assert registry.version("m", "03").aliases == ("candidate", "champion")
    assert AuditLog(registry.client, "m").read()[-1].change.changes["staging"].after == "1"


@pytest.mark.parametrize("alias", ["we ird", "v3", "Latest", "", "a/b"])
def test_an_alias_that_mlflow_refuses_does_not_get_into_the_log(three: str, registry: Registry, alias: str) -> None:
    before = len(AuditLog(registry.client, "m").read())
    done = enginery("promote", "m", "1", "--to", alias, "--why", "x")
    assert done.exit_code == 2
    assert "alias" in done.output
    assert len(AuditLog(registry.client, "m").read()) == before
    with pytest.raises(ValidationError, match="alias"):
        PromoteConfig(alias=alias)


def test_no_reason_is_refused(uri: str) -> None:
    assert enginery("promote", "m", "1").exit_code == 2
    assert "say why" in enginery("promote", "m", "1", "--why", " ").output


def test_no_store_and_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no MLflow store at sqlite:.* yet: nothing was ever registered"):
        enginery("models")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(EngineryError, match=r"MLflow at http://127.0.0.1:9 can't be used: Connection refused"):
        enginery("rollback", "m")


def test_help_is_there_before_mlflow_is_imported() -> None:
    names = "promote, audit, models, rollback"
    script = f"import sys; from enginery.cli import {names}; assert 'mlflow' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
