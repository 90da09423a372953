"""Attacks on the way from the registry to the server, with a trust policy and without: none of them gets through."""

import fcntl
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient

from components.common.registry import trust
from components.common.registry.audit_log import Proposal, change_aliases
from components.common.registry.keys import signing_key
from components.common.registry.model_registry import Registry
from components.common.registry.version_evaluation import load_evaluation
from components.promote import champion
from enginery.release.fetch import fetch, read_identity
from tests.conftest import Dataset
from tests.pipelines.servers import free_port, server
from tests.unit.registered import (
    PARTS,
    Machine,
    enginery,
    exported,
    make_and_promote,
    make_chain,
    pins,
    promote_chain,
    refuses,
    register_forged,
    replace_file,
    reseal,
    upload_forged,
)

NO_LAYERS = {"num_layers": 0, "num_reformats": 0, "convolutions": {}, "exceptions": {}}


def served(reference: str, target: Path, *options: object) -> Path:
    enginery("serve", "export", reference, target, *options)
    return target


# --- without a policy: who writes the registry or the store has no more than that


@pytest.fixture(params=["sqlite", pytest.param("server", marks=pytest.mark.slow)])
def writer(request: pytest.FixtureRequest, store: str, tmp_path: Path, monkeypatch) -> Iterator[Registry]:
    """An attacker with a write token, which opens all of MLflow's own API. Version 1 of m is there."""
    with ExitStack() as stack:
        uri = store
        if request.param == "server":
            port = free_port()
            stack.enter_context(server(tmp_path, port, store))
            uri = f"http://127.0.0.1:{port}"
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        make_and_promote(uri, tmp_path, "a-050")
        yield Registry(MlflowClient(tracking_uri=uri, registry_uri=uri))


def test_a_forged_chain_and_deleted_tags(writer: Registry, checkout: Path, tmp_path: Path) -> None:
    """A bundle with report and verdict that fit each other, uploaded and tagged as `promote` does, made champion."""
    number, _ = upload_forged(writer, make_chain(tmp_path / "forged", 99))
    writer.client.set_registered_model_alias("m", "champion", number)
    assert enginery("audit", "m").exit_code == 1
    with refuses("not-in-log"):
        enginery("deploy", "--env", "prod", "m@champion", "--repository", exported("m/1"))
    for with_tags in (True, False):
        for command in (
            ("serve", "export", f"m/{number}", tmp_path / "out"),
            ("release", tmp_path / "out", f"m/{number}"),
            ("deploy", "--env", "prod", f"m/{number}", "--repository", exported("m/1")),
            ("promote", "m", number, "--to", "staging", "--why", "x", "--force"),
        ):
            promotes = command[0] == "promote"
            with refuses("not-in-log" if with_tags else "no-tags" if promotes else "not-as-registered"):
                enginery(*command)
        assert writer.aliases("m")["champion"] == "1", "which the next command puts right"
        for name in writer.version("m", number).tags:  # which was enough to be taken for somebody else's model
            writer.client.delete_model_version_tag("m", number, name)
    for name in writer.version("m", "1").tags:  # one that was promoted
        writer.client.delete_model_version_tag("m", "1", name)
    for command in (("serve", "export", "m/1", tmp_path / "out"), ("release", tmp_path / "out", "m/1")):
        with refuses("not-as-registered"):
            enginery(*command)
    assert not (tmp_path / "out").exists()
    assert not pins("prod").is_deployed


def test_files_and_tags_of_another_model_under_the_name_of_a_champion(three: str, registry: Registry, tmp_path) -> None:
    """All three artifacts and every tag replaced by those of another model: only the log knows."""
    other = make_chain(tmp_path / "other", 99)
    version = registry.version("m", "3")
    with ExitStack() as stack:
        for part in PARTS:
            folder = stack.enter_context(registry.files(version, part))
            stack.callback(shutil.copytree, shutil.copytree(folder, tmp_path / part), folder, dirs_exist_ok=True)
            shutil.copytree(other[part], folder, dirs_exist_ok=True)
        for key, value in load_evaluation(other["report"], other["verdict"]).tags.items():
            registry.client.set_model_version_tag("m", "3", key, value)
        done = enginery("audit", "m")
        assert done.exit_code == 1
        assert "the bundle that lies in the registry is not the one that was promoted as m version 3" in done.output
        for command in (
            ("promote", "m", "3", "--to", "staging", "--why", "x", "--force"),
            ("release", tmp_path / "out", "m/3"),
        ):
            with refuses("not-as-promoted"):
                enginery(*command)


CPU_MODEL = {"weight_bits": 8, "activations": "signed", "saturates_on": []}
VICTIM = "../../../victim/bashrc"


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(cpu_models=[{**CPU_MODEL, "file": VICTIM}]),
        lambda record: record["models"].update(int8=VICTIM),
        lambda record: record["models"].pop("fp32"),  # which whoever counts the model reads
        lambda record: record.update(cpu_models=[{**CPU_MODEL, "file": "model.py"}]),  # which Triton would run
        lambda record: record["engines"][0].update(file="../../victim/bashrc"),
        lambda record: record["engines"][0].update(layers={**NO_LAYERS, "file": "../../victim/bashrc"}),
        lambda record: record["engines"][0].update(compute_capability=f"/{VICTIM}"),
    ],
)
def test_a_bundle_that_names_files_elsewhere(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Servers of it would write and read them."""
    bundle = make_chain(tmp_path / "chain", 50, planned=("int8.plan",))["bundle"]
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "bashrc").write_text("own")
    for name in ("bashrc", "model.py"):
        replace_file(bundle, name, b"foreign")
    reseal(bundle, change)
    with refuses("invalid-manifest"):
        served(str(bundle), tmp_path / "out")
    assert (tmp_path / "victim" / "bashrc").read_text() == "own"


def test_without_a_policy_uses_say_that_nobody_vouches(store: str, checkout: Path, tmp_path, capfd, caplog) -> None:
    paths = make_chain(tmp_path / "a-050", 50)
    for use in (
        lambda: promote_chain(store, paths, tmp_path / "promotion"),
        lambda: enginery("serve", "export", "m/1", tmp_path / "repository"),
        lambda: enginery("deploy", "--env", "dev", "m/1", "--repository", tmp_path / "repository"),
        lambda: fetch(str(tmp_path / "repository"), tmp_path / "pod", pins("dev").repository_digest),
    ):
        said = getattr(use(), "output", "")
        assert "nobody vouches for it, since this machine has no trust policy" in said + capfd.readouterr().err
    with pytest.raises(Exception, match=r"."):  # the bytes are no network; what is said comes before they are read
        mlflow.pyfunc.load_model("models:/m/1")
    assert "nobody vouches for it" in caplog.text
    capfd.readouterr()
    trust.check_folder("m\x1b[2J", tmp_path)
    assert r"m\x1b[2J: nobody vouches for it" in capfd.readouterr().err, "the terminal is left alone"


# --- with a policy: who has no key that it names


def test_a_registry_writer_without_a_key(trusted: Machine, registry: Registry, tmp_path: Path) -> None:
    """A forged chain with tags and a forged entry in the log; then with the true verdict of version 1 beside it."""
    number = register_forged(registry, make_chain(tmp_path / "f-099", 99), "champion")
    own = registry.statements(registry.version("m", "1"))["verdict.dsse.json"]
    for code in ("no-verdict", "statement-other-digest"):
        for command in (
            ("serve", "export", "m@champion", tmp_path / "out"),
            ("release", tmp_path / "out", f"m/{number}"),
            ("approve", f"m/{number}", "--env", "prod", "--key", trusted.key("board")),
            ("promote", "m", number, "--to", "staging", "--why", "x", "--force"),
        ):
            with refuses(code):
                enginery(*command)
        registry.add_statement(registry.version("m", number), "verdict.dsse.json", own)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("way", "top1", "code"),
    [
        ("registered", 99, "no-verdict"),
        ("registered", 1, "no-verdict"),
        ("with the verdict of another", 99, "statement-other-digest"),
        ("changed in the store", 1, "statement-other-digest"),
        ("without files", 99, "files-missing"),
    ],
)
def test_a_forged_champion_neither_blocks_a_version_nor_lets_a_worse_one_through(
    trusted: Machine, store: str, registry: Registry, way: str, top1: int, code: str
) -> None:
    """Alias, tags and entry in the log are right; versions are compared with the last champion that was signed."""
    forged = make_chain(trusted.folder / f"forged-{top1}", top1)
    if way == "changed in the store":
        trusted.promote(store, "b-055")
        for part in ("report", "verdict"):
            with registry.files(registry.version("m", "2"), part) as folder:
                shutil.copytree(forged[part], folder, dirs_exist_ok=True)
        evaluation = load_evaluation(forged["report"], forged["verdict"])
        for name, value in evaluation.tags.items():
            registry.client.set_model_version_tag("m", "2", name, value)
        entry = Proposal(kind="promote", aliases={"champion": "2"}, why="x", digests=evaluation.digests)
        change_aliases(registry, "m", lambda situation: entry)
    elif way == "without files":
        registry.client.create_model_version("m", "nobody-knows://host/m")
        entry = Proposal(kind="promote", aliases={"champion": "2"}, why="x")
        change_aliases(registry, "m", lambda situation: entry)
    else:
        register_forged(registry, forged, "champion")
    if way == "with the verdict of another":
        own = registry.statements(registry.version("m", "1"))["verdict.dsse.json"]
        registry.add_statement(registry.version("m", "2"), "verdict.dsse.json", own)
    said = trusted.promote(store, "c-040")
    assert "worse than the champion: top-1 40.00 % (INT8), champion version 1 50.00 %" in said
    with refuses("worse"):
        enginery("promote", "m", "3", "--why", "x")
    said = trusted.promote(store, "d-051")
    assert "not worse: top-1 51.00 % (INT8), champion version 1 50.00 %" in said
    assert f"; version 2 does not count as champion ({code}): " in said
    assert registry.aliases("m")["champion"] == "4"


def test_champions_from_before_the_policy_count_no_more(machine: Machine, store: str, registry: Registry) -> None:
    machine.without_policy()
    promote_chain(store, machine.judged("a-090", ""), machine.folder / "promotion")
    machine.policy()
    said = machine.promote(store, "b-050")
    assert "there was no champion that the trust policy accepts; version 1 does not count as champion (no-v" in said
    assert registry.aliases("m")["champion"] == "2"


BUNDLE = {"bundle": "sha256:" + 64 * "0"}


def statement(
    machine: Machine, kind: str = "approval", *, signer: str = "", digests: Any = BUNDLE, **more: Any
) -> bytes:
    """A verdict on a bundle, or its approval as version 1 of m for prod. `more`: fields that differ."""
    approval = {"model": "m", "version": "1", "environment": "prod", "approved": "2026-01-01T00:00:00Z"}
    usual = {"passed": True} if kind == "verdict" else {**approval, "expires": "2999-01-01T00:00:00Z"}
    key = signing_key(machine.key(signer or ("ci" if kind == "verdict" else "board")))
    return trust._signed(kind, digests, {**usual, **more}, key)


def check_statements(verdict: bytes, approval: bytes | None = None) -> None:
    approvals = {trust.approval_file("prod"): approval} if approval else {}
    trust.check_chain("it", BUNDLE, {trust.VERDICT: verdict, **approvals}, model="m", version="1")


def test_every_part_of_a_statement_counts(machine: Machine) -> None:
    own = json.loads(statement(machine, "verdict"))
    check_statements(json.dumps(own).encode())
    foreign = json.loads(statement(machine, "verdict", signer="stranger", digests={}))
    for change, code in (
        ({"payload": foreign["payload"]}, "statement-changed"),
        ({"payload": foreign["payload"][:40]}, "statement-damaged"),
        ({"payloadType": "text/plain"}, "statement-changed"),
        ({"payloadType": []}, "statement-changed"),
        ({"signatures": []}, "key-unknown"),
    ):
        with refuses(code):
            check_statements(json.dumps({**own, **change}).encode())
    with refuses("statement-other-kind"):
        check_statements(statement(machine, "approval", signer="ci", passed=True))
    for passed in (False, None, 1, "true"):
        with refuses("verdict-not-passed"):
            check_statements(statement(machine, "verdict", passed=passed))


NO_TIMES = (None, [], "", "never", "2999-01-01T00:00:00", 4e9)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"environment": "staging"}, "approval-other-environment"),
        ({"model": "other"}, "approval-other-model"),
        ({"version": "2"}, "approval-other-version"),
        ({"digests": {"bundle": "sha256:" + 64 * "1"}}, "statement-other-digest"),
        ({"signer": "ci"}, "key-without-right"),
        ({"signer": "stranger"}, "key-unknown"),
        ({"expires": "2026-01-02T00:00:00Z"}, "approval-expired"),
        *(({name: time}, "approval-expired") for name in ("expires", "approved") for time in NO_TIMES),
    ],
)
def test_an_approval_of_something_else_or_without_a_time(machine: Machine, change: dict[str, Any], code: str) -> None:
    """Also by a signer that is trusted and does not write what `enginery approve` writes."""
    machine.policy(environment="prod")
    verdict = statement(machine, "verdict")
    with refuses("no-approval"):
        check_statements(verdict)
    check_statements(verdict, statement(machine))
    with refuses(code):
        check_statements(verdict, statement(machine, **change))


def test_an_approval_of_another_model_or_version(trusted: Machine, store: str, registry: Registry, tmp_path) -> None:
    trusted.policy(environment="prod")
    for model in ("m", "other"):
        paths = {part: trusted.folder / "a-050" / part for part in (*PARTS, "dataset")}
        promote_chain(store, paths, tmp_path / model, model)
    for reference, other, code in (("other/1", "1", "approval-other-model"), ("m/1", "2", "approval-other-version")):
        trusted.approve(reference, "prod")
        approval = registry.statements(registry.version(*reference.split("/")))["approval-prod.dsse.json"]
        registry.add_statement(registry.version("m", other), "approval-prod.dsse.json", approval)
        with refuses(code):
            served(f"m/{other}", tmp_path / "out")
    served("m/1", tmp_path / "first")


def test_an_approval_ends_within_the_years_that_a_date_has(trusted: Machine) -> None:
    done = enginery("approve", "m/1", "--env", "prod", "--key", trusted.key("board"), "--days", 9_999_999)
    assert (done.exit_code, "--days" in done.output) == (2, True)


def test_names_of_environments_are_those_of_policies(trusted: Machine, tmp_path: Path) -> None:
    words = ("approve", "m/1", "--key", trusted.key("board"), "--env")
    for name in ("", "a b", "../prod", "prod\n", "x" * 101):
        assert enginery(*words, name).exit_code == 2
    trusted.policy(environment="2-prod", board={"approves": ["2-prod"]})
    assert enginery(*words, "2-prod").exit_code == 0
    served("m/1", tmp_path / "out")


def test_an_approval_that_does_not_count_replaces_none_that_does(trusted: Machine, tmp_path: Path) -> None:
    expired = {"approves": ["prod"], "expires": "2026-01-01"}
    trusted.policy(environment="prod")
    trusted.approve("m/1", "prod")
    for name, rights, code in (
        ("stranger", {}, "key-unknown"),
        ("ci", {}, "key-without-right"),
        ("stranger", {"stranger": expired}, "key-expired"),
    ):
        trusted.policy(environment="prod", **rights)
        with refuses(code):
            enginery("approve", "m/1", "--env", "prod", "--key", trusted.key(name))
    served("m/1", tmp_path / "out")


def test_deploy_asks_for_the_approval_of_its_environment(trusted: Machine, checkout: Path, tmp_path: Path) -> None:
    repository = served("m/1", tmp_path / "repository", "--key", trusted.key("ci"))
    trusted.approve("m/1", "staging")
    enginery("deploy", "--env", "staging", "m/1", "--repository", repository)
    for command in (("m/1", "--repository", repository), ("--from", "staging")):
        with refuses("no-approval"):
            enginery("deploy", "--env", "prod", *command)
    assert not pins("prod").is_deployed
    (repository / "model.sig").unlink()
    with refuses("not-signed"):
        enginery("deploy", "--env", "staging", "m/1", "--repository", repository)


def test_an_approval_from_the_future_shuts_no_later_one_out(trusted: Machine, store: str, tmp_path: Path) -> None:
    ahead = (datetime.now(UTC) + timedelta(days=20)).strftime(trust._TIME)
    with pytest.MonkeyPatch.context() as patch:  # the approver's clock
        patch.setattr(trust, "utc_now", lambda: ahead)
        trusted.approve("m/1", "prod")
    trusted.policy(environment="prod", newest=True)
    with refuses("approval-in-future"):
        served("m/1", tmp_path / "out")
    trusted.approve("m/1", "prod")
    served("m/1", tmp_path / "out")


def test_downgrades_to_approved_versions(
    trusted: Machine, store: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alias is put back to a version that was approved once: its signatures are all right."""
    trusted.promote(store, "b-060")
    clock = iter(f"2026-01-0{day}T00:00:00Z" for day in range(1, 9))
    with monkeypatch.context() as patch:
        patch.setattr(trust, "utc_now", lambda: next(clock))
        for number in ("1", "2"):
            trusted.approve(f"m/{number}", "prod")
    trusted.policy(environment="prod", newest=True)
    first = served("m/1", tmp_path / "first", "--key", trusted.key("ci"))
    second = served("m@champion", tmp_path / "second", "--key", trusted.key("ci"))
    with refuses("other-digest"):  # in the place of the one that Git names
        fetch(str(first), tmp_path / "pod", read_identity(second).digest)
    registry.client.set_registered_model_alias("m", "champion", "1")
    with refuses("approval-older"):
        served("m@champion", tmp_path / "out")
    trusted.approve("m/1", "prod")
    served("m@champion", tmp_path / "out")


@pytest.mark.parametrize("content", ["", "[]", '{"prod/m": 3}'])
def test_newest_approvals_that_are_damaged(machine: Machine, content: str) -> None:
    machine.policy(environment="prod", newest=True)
    policy = trust.find_policy()
    Path(policy.newest_approvals).write_text(content)
    with refuses("approvals-unwritable") as refusal:
        trust._check_newest(policy, "it", "prod/m", "2026-01-01T00:00:00Z")
    assert "https:" not in str(refusal.value)


def test_of_two_approvals_seen_at_once_the_newer_is_kept(machine: Machine) -> None:
    machine.policy(environment="prod", newest=True)
    policy = trust.find_policy()
    file = Path(policy.newest_approvals)
    ended: list[str] = []

    def older() -> None:
        with refuses("approval-older"):
            trust._check_newest(policy, "m version 1", "prod/m", "2026-01-01T00:00:00Z")
        ended.append("refused")

    with file.with_name(".newest.json.lock").open("w") as lock:  # as the other holds it
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=older)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        file.write_text('{"prod/m": "2026-01-02T00:00:00Z"}')
    thread.join(10)
    assert ended == ["refused"]
    assert json.loads(file.read_bytes()) == {"prod/m": "2026-01-02T00:00:00Z"}


def test_a_rollback_asks_the_policy(trusted: Machine, store: str, checkout: Path, capfd) -> None:
    trusted.promote(store, "b-060")
    for number in ("1", "2"):
        trusted.approve(f"m/{number}", "staging")
        repository = exported(f"m/{number}", "--key", trusted.key("ci"))
        enginery("deploy", "--env", "staging", f"m/{number}", "--repository", repository)
    trusted.policy(board={"approves": ["prod"]})
    with refuses("key-without-right"):
        enginery("deploy", "--env", "staging", "--rollback")
    assert pins("staging").version == "2"
    trusted.without_policy()
    Path(store.removeprefix("sqlite:///")).unlink()  # the registry may be what is down
    done = enginery("deploy", "--env", "staging", "--rollback")
    assert "nobody vouches for it" in done.output + capfd.readouterr().err
    assert pins("staging").version == "1"


def test_a_store_writer_against_the_pod(trusted: Machine, tmp_path: Path) -> None:
    """A repository that was changed after the signature; and one with a signature of something else in it."""
    store = served("m/1", tmp_path / "by-ci", "--key", trusted.key("ci"))
    replace_file(store, "m_labels/1/model.py", b"import os\n")
    with refuses("signature-mismatch"):  # though the very digest is asked for
        fetch(str(store), tmp_path / "pod", read_identity(store).digest)
    with refuses("signature-mismatch"):
        enginery("serve", "start", store, "--http-port", "1")
    assert not (tmp_path / "pod").exists()
    # All that the key signed is there, a release, and beside it what would be loaded.
    forged, signed = served("m/1", tmp_path / "unsigned"), tmp_path / "signed"
    signed.mkdir()
    (signed / "model.py").write_text("the only thing that was signed")
    trust.sign_folder(signed, trusted.key("ci"))
    shutil.copytree(signed, forged, dirs_exist_ok=True)
    digest = replace_file(forged, "model.py", (forged / "model.py").read_bytes())
    with refuses("signature-mismatch", says="model.sig does not cover m/1/README, "):
        fetch(str(forged), tmp_path / "pod", digest)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda text: DEEP, "signature-damaged"),
        (lambda text: '{"verificationMaterial": {"publicKey": {"hint": "x"}}, "more": ' + DEEP, "signature-damaged"),
        (lambda text: text.replace('"dsseEnvelope"', '"dsse_envelope"'), "signature-mismatch"),  # as protobuf takes it
    ],
)
def test_signature_files_that_are_none(machine: Machine, tmp_path, change: Callable[[str], str], code: str) -> None:
    """Those of another signer or with a changed field: release/test_keyless.py."""
    (signed := tmp_path / "signed").mkdir()
    trust.sign_folder(signed, machine.key("ci"))
    (signed / trust.SIGNATURE).write_text(change((signed / trust.SIGNATURE).read_text()))
    with refuses(code):
        trust.check_folder("it", signed)
    assert "model.sig" in trust.folder_problem(signed, machine.keys["ci"][1].read_text())


def test_signatures_and_statements_without_end(machine: Machine, tmp_path: Path) -> None:
    with (tmp_path / trust.SIGNATURE).open("wb") as file:
        file.truncate(1 << 40)
    with refuses("signature-damaged"):
        trust.check_folder("it", tmp_path)
    public = machine.keys["ci"][1].read_text()
    assert "more than 16,777,216 bytes" in trust.folder_problem(tmp_path, public)  # as `enginery verify --key` asks
    for size_bytes, num_files in ((1 << 20, 1), (0, 101)):
        for number in range(num_files):
            (tmp_path / f"{number}.dsse.json").write_bytes(bytes(size_bytes))
        with refuses("statements-too-large"):
            trust.read_statements(tmp_path)


@pytest.mark.parametrize("name", [trust.SIGNATURE, "more.dsse.json"])
def test_a_link_in_the_place_of_a_signature(machine: Machine, tmp_path: Path, name: str) -> None:
    """Even if nothing is checked, as without a policy, and by who pushes: no other file of the machine comes along."""
    bundle = make_chain(tmp_path / "a-050", 50)["bundle"]
    trust.sign_folder(bundle, machine.key("ci"))
    public = machine.keys["ci"][1].read_text()
    assert trust.folder_problem(bundle, public) == ""
    (bundle / name).unlink(missing_ok=True)
    (tmp_path / "secret").write_text("of this machine")
    (bundle / name).symlink_to(tmp_path / "secret")
    if name != trust.SIGNATURE:
        assert "does not cover more.dsse.json" in trust.folder_problem(bundle, public)
    machine.without_policy()
    fetch(str(bundle), tmp_path / "copy", read_identity(bundle).digest)
    assert not (tmp_path / "copy" / name).exists()


def test_a_policy_that_can_not_be_read_trusts_nothing(trusted: Machine, tmp_path: Path, monkeypatch) -> None:
    file, nowhere = trusted.folder / "trust.yaml", tmp_path / "nowhere"
    relative = "newest_approvals: newest.json"  # others may fill the working directory
    undecided = "environment: prod"  # on whether an older version may come back
    bad_key = "keys: {ci: {public_key: x, expires: 2030-01-01}}"
    for text in ("keys: 1", "[", bad_key, "environments: prod", relative, undecided):
        file.write_text(text)
        with refuses("policy-invalid"):
            served("m/1", tmp_path / "out")
    file.write_text("keys: {}")
    monkeypatch.chdir(trusted.folder)
    monkeypatch.setenv(trust.POLICY_VARIABLE, file.name)
    with refuses("policy-invalid"):
        served("m/1", tmp_path / "out")
    monkeypatch.setenv(trust.POLICY_VARIABLE, str(nowhere))
    with refuses("policy-unreadable"):
        served("m/1", tmp_path / "out")
    monkeypatch.delenv(trust.POLICY_VARIABLE)
    (link := tmp_path / "default.yaml").symlink_to(nowhere)
    monkeypatch.setattr(trust, "DEFAULT_POLICY", link)
    with refuses("policy-unreadable"):
        served("m/1", tmp_path / "out")


def test_forged_champions_are_not_run(
    machine: Machine, registry: Registry, tmp_path: Path, digits_dataset: Dataset, monkeypatch, capfd
) -> None:
    """Tags, entry in the log and alias are right, as a registry writer makes them; `promote` would run its bundle."""
    old = make_chain(tmp_path / "old", 99.0, data=digits_dataset, favourite=3, split="other")
    register_forged(registry, old, "champion")
    run: list[Any] = []
    monkeypatch.setattr(champion, "_measure", lambda bundle, *_: run.append(bundle))
    arguments = (registry, registry.version("m", "1"), "int8", digits_dataset, lambda done, total: None)
    with refuses("no-verdict"):
        champion.remeasure(*arguments)
    assert run == []
    machine.without_policy()
    champion.remeasure(*arguments)
    assert not capfd.readouterr().err  # the step says it of the bundle that it promotes
    assert not run[0].path.exists()  # a copy, which is gone
