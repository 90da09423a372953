"""models, promote, rollback, audit, and compare of versions: what they show, change and refuse."""

import json
import os
import shutil
import sqlite3
import time
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import ValidationError
from sqlalchemy import event
from sqlalchemy.pool import Pool

from components.common.contracts.manifests import MANIFEST
from components.common.registry.audit_log import AuditLog
from components.common.registry.model_registry import Registry
from components.common.registry.store import sqlite_file
from components.promote.config import PromoteConfig
from enginery.cli.commands import cli
from enginery.registry.models import version_summary
from tests.unit.registered import (
    CHANGED,
    PARTS,
    Machine,
    enginery,
    make_and_promote,
    promote_chain,
    refuses,
    register_failed,
)


def test_models_lists_versions(three: str) -> None:
    text = enginery("models").output
    assert "@champion" in text
    assert "60.00" in text
    rows = json.loads(enginery("models", "m", "--json").output)
    found = [(row["version"], row["aliases"], row["score_pct"]) for row in rows]
    assert found == [("3", ["champion", "candidate"], 60.0), ("2", [], 40.0), ("1", [], 50.0)]
    assert {(row["verdict"], row["precision"]) for row in rows} == {("pass, not proved", "int8")}


def test_tags_of_somebody_else_are_shown_as_they_are(three: str, registry: Registry) -> None:
    for key, value in (("precision", "[/x]"), ("verdict", "[/y]"), ("score_pct", "nan")):
        registry.client.set_model_version_tag("m", "1", key, value)
    name = """a'b"c"""  # which MLflow's filters can't quote
    registry.client.create_registered_model(name)
    registry.client.create_model_version(name, "s3://bucket/m")
    text = enginery("models").output
    assert [word in text for word in ("[/X]", "[/y]", name)] == [True] * 3
    assert [row["model"] for row in json.loads(enginery("models", name, "--json").output)] == [name]
    assert [row["score_pct"] for row in json.loads(enginery("models", "m", "--json").output)] == [60.0, 40.0, None]


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("when", "[/x]", ""),
        ("changes", {"v1": {"before": None, "after": "3"}}, "log-damaged"),  # which MLflow never sets
        ("changes", {"champion": {"before": None, "after": "[/x]"}}, "log-damaged"),
    ],
)
def test_changed_entries_of_the_log(three: str, registry: Registry, field: str, value: object, code: str) -> None:
    file = sqlite_file(registry.uri)
    with closing(sqlite3.connect(file)) as connection, connection:
        ((text,),) = connection.execute("SELECT value FROM params WHERE key = '0001'")
        changed = json.dumps({**json.loads(text), field: value})
        connection.execute("UPDATE params SET value = ? WHERE key = '0001'", (changed,))
    for command in (("audit", "m"), ("promote", "m", "1", "--to", "staging", "--why", "x")):
        with refuses(code) if code else nullcontext():
            assert enginery(*command).exit_code == 0


def test_only_a_person_brings_rolled_back_bundles_back(
    three: str, registry: Registry, made_once: Path, tmp_path: Path
) -> None:
    done = enginery("rollback", "m", "--why", "it confuses\n3 and 8")  # which could look like an entry of the log
    assert "m@champion: version 3 -> 1" in done.output
    assert registry.aliases("m")["champion"] == "1"
    with refuses("no-champion-before"):
        enginery("rollback", "m")
    last = AuditLog(registry.client, "m").read()[-1]
    assert (last.change.kind, last.change.why) == ("rollback", "it confuses 3 and 8")
    enginery("promote", "m", "3", "--to", "staging", "--why", "to look at it")  # and not to bring it back
    same = {name: made_once / "c-060" / name for name in (*PARTS, "dataset")}
    said = promote_chain(three, same, tmp_path / "again")
    assert "as @candidate: this very bundle was champion as version 3, and was rolled back on" in said
    assert "(it confuses 3 and 8)" in said
    assert registry.aliases("m") == {"candidate": "4", "champion": "1", "staging": "3"}
    enginery("promote", "m", "4", "--why", "3 and 8 are told apart now", "--force")
    assert registry.aliases("m")["champion"] == "4"
    assert AuditLog(registry.client, "m").read()[-1].change.forced is False, "nothing was refused"


def test_rollback_to_a_version_that_was_deleted(three: str, registry: Registry) -> None:
    registry.client.delete_model_version("m", "1")
    with refuses("version-deleted"):
        enginery("rollback", "m")
    assert registry.aliases("m")["champion"] == "3"


def test_rollback_of_a_version_that_was_deleted(three: str, registry: Registry) -> None:
    registry.client.delete_model_version("m", "3")
    assert enginery("audit", "m").exit_code == 1
    enginery("rollback", "m")
    assert registry.aliases("m") == {"champion": "1"}
    assert [entry.change.kind for entry in AuditLog(registry.client, "m").read()][-2:] == ["promote", "rollback"]


def test_an_alias_that_was_removed_is_not_a_version_that_was(three: str, registry: Registry) -> None:
    """For which the fix is `enginery rollback`; here the next change sets the alias again."""
    registry.client.delete_registered_model_alias("m", "champion")
    (problem,) = json.loads(enginery("audit", "m", "--json").output)["problems"]
    assert problem.startswith("@champion is not set, by the log it is version 3")
    enginery("promote", "m", "1", "--to", "staging", "--why", "x")
    assert registry.aliases("m")["champion"] == "3"


def test_a_database_that_may_only_be_read(three: str, registry: Registry) -> None:
    def read_only(connection: sqlite3.Connection, *_: object) -> None:
        connection.execute("PRAGMA query_only = 1")

    def as_before(connection: sqlite3.Connection, *_: object) -> None:
        connection.execute("PRAGMA query_only = 0")

    event.listen(Pool, "checkout", read_only)
    event.listen(Pool, "checkin", as_before)
    began = time.monotonic()
    try:
        with refuses("permission-denied"):
            enginery("promote", "m", "1", "--to", "staging", "--why", "x")
        assert time.monotonic() - began < 15  # and not when patience with a busy one ends
    finally:
        event.remove(Pool, "checkout", read_only)
        event.remove(Pool, "checkin", as_before)


def test_a_database_that_can_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow.db").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    began = time.monotonic()
    with refuses("permission-denied", says=f"can't use {tmp_path / 'mlflow.db'}: it can't be opened or written"):
        enginery("models")
    assert time.monotonic() - began < 15  # MLflow would try for 100 s


def test_a_database_that_another_process_holds(three: str, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.common.registry.model_registry._PATIENCE_S", 0.1)
    file = sqlite_file(registry.uri)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with refuses("database-locked"):
            enginery("promote", "m", "1", "--to", "staging", "--why", "x")


def test_a_worse_one_is_refused_or_forced(three: str, registry: Registry, tmp_path: Path) -> None:
    command = ("promote", "m", "2", "--to", "champion", "--why", "smaller")
    with refuses("worse") as caught:
        enginery(*command)
    assert caught.value.exit_code == 3
    assert registry.aliases("m")["champion"] == "3"
    done = enginery(*command, "--force")
    assert "m@champion: version 3 -> 2 forced, overruling: it is worse: top-1 40.00 %" in done.output
    last = AuditLog(registry.client, "m").read()[-1].change
    assert (last.forced, last.why, last.kind) == (True, "smaller", "manual")
    assert (last.comparison.champion_version, last.comparison.not_worse) == ("3", False)
    assert last.digests["bundle"] == registry.version("m", "2").tags["bundle_digest"]
    assert last.overruled.startswith("it is worse: top-1 40.00 %")
    assert "forced" in enginery("audit", "m").output
    make_and_promote(three, tmp_path, "d-090", split="two")  # measured on other images
    with refuses("other-images"):
        enginery("promote", "m", "4", "--why", "x")
    registry.client.set_model_version_tag("m", "2", "report_digest", "sha256:0")
    with refuses("not-comparable"):
        enginery("promote", "m", "1", "--why", "x")


def test_a_folder_of_files_may_have_any_name(three: str, registry: Registry, tmp_path: Path) -> None:
    (tmp_path / "a#b?c/bundle").mkdir(parents=True)
    number = registry.client.create_model_version("m", str(tmp_path / "a#b?c")).version
    with registry.files(registry.version("m", str(number)), "bundle") as found:
        assert found.is_dir()


def test_what_no_force_helps_against(three: str, registry: Registry, tmp_path: Path) -> None:
    failed = register_failed(registry, tmp_path / "failed")
    for more in ((), ("--force",), ("--to", "staging")):
        with refuses("gate-failed"):
            enginery("promote", "m", failed, "--why", "we need it", *more)
    unknown = registry.client.create_model_version("m", str(tmp_path)).version
    for key in registry.version("m", "1").tags:
        registry.client.delete_model_version_tag("m", "1", key)
    registry.client.delete_model_version_tag("m", "2", "bundle_digest")
    for number, code in ((unknown, "no-tags"), ("1", "no-tags"), ("2", "not-as-registered")):
        for alias in ("champion", "staging"):
            with refuses(code):
                enginery("promote", "m", number, "--to", alias, "--why", "x", "--force")
    with refuses("no-tags"):
        enginery("rollback", "m")


def test_audit_shows_the_chain_and_what_does_not_fit(three: str, registry: Registry) -> None:
    done = enginery("audit", "m")
    assert done.exit_code == 0, done.output
    found = json.loads(enginery("audit", "m", "--json").output)
    tags = registry.version("m", "3").tags
    chain = {link["name"]: link["digest"] for link in found["chain"]}
    assert list(chain) == ["dataset", "validation split", "checkpoint", *PARTS, "version"]
    assert all(chain[part] == tags[f"{part}_digest"] for part in ("dataset", *PARTS))
    assert (chain["checkpoint"], chain["version"]) == ("sha256:" + "c" * 64, "3")
    assert [entry["number"] for entry in found["entries"]] == [1, 2, 3]
    assert found["problems"] == []
    registry.client.set_model_version_tag("m", "3", "bundle_digest", "sha256:0")
    registry.client.set_registered_model_alias("m", "staging", "2")
    done = enginery("audit", "m")
    assert done.exit_code == 1
    assert "and its tag says sha256:0" in done.output
    assert "@staging is version 2, by the log it is not set: it was changed without enginery" in done.output


def test_audit_shows_approvals_and_which_the_policy_refuses(trusted: Machine, registry: Registry) -> None:
    trusted.approve("m/1", "prod")
    trusted.approve("m/1", "staging")
    trusted.policy(board={"approves": ["prod", "dev"]})
    with registry.files(registry.version("m", "1"), "bundle", MANIFEST) as file:
        shutil.copy(file.parents[1] / "approval-prod.dsse.json", file.parents[1] / "approval-dev.dsse.json")
        (file.parents[1] / os.fsdecode(b"approval-\xff.dsse.json")).write_bytes(b"{}")  # as any writer may
    done = enginery("audit", "m", "--json")
    notes = [link["note"] for link in json.loads(done.stdout)["chain"] if link["name"] == "approval"]
    assert (done.exit_code, len(notes)) == (0, 3)
    assert "for prod" in notes
    assert any("its approval is for prod, and this is dev" in note for note in notes)
    assert any("m version 1 is refused" in note and "approve for staging" in note for note in notes)


def test_audit_says_what_it_read(three: str, registry: Registry) -> None:
    with registry.files(registry.version("m", "3"), "bundle", "int8.onnx") as model:
        before = model.read_bytes()
        model.write_bytes(bytes(len(before)))
        try:
            done = enginery("audit", "m")
            assert done.exit_code == 0
            assert "the manifests of the champion, not its other files (--files reads those, too)" in done.output
            done = enginery("audit", "m", "--files")
            assert done.exit_code == 1
            assert CHANGED in done.output
        finally:
            model.write_bytes(before)
    assert json.loads(enginery("audit", "m", "--files", "--json").stdout)["files_checked"] is True


def test_compare_of_versions_and_runs(three: str, registry: Registry, tmp_path: Path) -> None:
    for first, second in (("m@champion", "m/1"), ("m:3", "m:1")):
        found = json.loads(enginery("compare", first, second, "--json").output)
        assert [run["run_id"] for run in found["runs"]] == ["m/3", "m/1"]
        rows = [(run["rows"]["int8"]["score_pct"], run["rows"]["int8"]["verdict"]) for run in found["runs"]]
        assert rows == [(60.0, "pass, not proved"), (50.0, "pass, not proved")]
    assert "A  m/3" in enginery("compare", "m@champion", "m/1").output
    with refuses("same-run-twice"):
        enginery("compare", "m@champion", "m/3")
    run = version_summary(registry, "m/1").model_copy(update={"run_id": "run-1", "arguments": {"epochs": 2}})
    (tmp_path / "summary.json").write_text(run.model_dump_json())
    found = json.loads(enginery("compare", "m/3", tmp_path / "summary.json", "--json").output)
    assert found["arguments"] == {}
    assert "arguments are not compared: a version has the settings of its steps" in found["warnings"][-1]
    assert "the same in all: arguments" not in enginery("compare", "m/3", tmp_path / "summary.json").output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("models", "nix"), "no-model"),
        (("models", "a'b\"c"), "no-model"),
        (("audit", "nix"), "no-model"),
        (("rollback", "nix"), "no-model"),
        (("promote", "nix", "1", "--why", "x"), "no-model"),
        (("promote", "a/b", "1", "--why", "x"), "no-model"),
        (("promote", "m", "99", "--why", "x"), "no-version"),
        (("promote", "m", "\N{SUPERSCRIPT TWO}", "--why", "x"), "invalid-version"),
        (("promote", "m", "three", "--why", "x"), "invalid-version"),
        (("promote", "m", "3", "--why", "x"), "nothing-to-change"),
        (("promote", "m", "03", "--why", "x"), "nothing-to-change"),
    ],
)
def test_what_is_not_there(three: str, arguments: tuple[str, ...], code: str) -> None:
    with refuses(code):
        enginery(*arguments)


def test_the_fix_of_a_missing_alias_works_when_typed(three: str, registry: Registry) -> None:
    with refuses("no-alias") as caught:
        enginery("compare", "m@nix", "m/1")
    typed = str(caught.value).partition("Set it: enginery ")[2].replace("VERSION", "2")
    assert enginery(*typed.split()).exit_code == 0
    assert registry.aliases("m")["nix"] == "2"


def test_a_version_with_a_zero_before_it(three: str, registry: Registry) -> None:
    """An alias shows 1 where 01 was asked for: that never became true, so the change was made again for ever."""
    enginery("promote", "m", "01", "--to", "staging", "--why", "x")
    assert registry.aliases("m")["staging"] == "1"
    assert registry.version("m", "03").aliases == ("candidate", "champion")
    assert AuditLog(registry.client, "m").read()[-1].change.changes["staging"].after == "1"


def test_what_mlflow_refuses_does_not_get_into_the_log(three: str, registry: Registry) -> None:
    for alias in ("we ird", "v3", "Latest", "", "a/b"):
        done = enginery("promote", "m", "1", "--to", alias, "--why", "x")
        assert done.exit_code == 2
        assert "alias" in done.output
        with pytest.raises(ValidationError, match="alias"):
            PromoteConfig(alias=alias)
    for why in ((), ("--why", " "), ("--why", "x" * 501)):
        assert enginery("promote", "m", "1", *why).exit_code == 2
    assert len(AuditLog(registry.client, "m").read()) == 3


@pytest.mark.parametrize("command", [("promote", "m", "1"), ("rollback", "m"), ("deploy", "m/1", "--env", "prod")])
def test_a_reason_holds_no_secret(command: tuple[str, ...]) -> None:
    """It goes into MLflow or Git, and stays there."""
    done = CliRunner().invoke(cli, [*command, "--why", "see https://glpat-0123456789abcdef@git.example.com/x"])
    assert (done.exit_code, "holds a user" in done.output, "glpat" in done.output) == (2, True, False)
