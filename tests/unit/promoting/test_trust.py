"""The trust policy under attack: who may write registry and store, and has no key that the policy names."""

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import mlflow
import pytest
import yaml
from mlflow import MlflowClient

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import Artifact, BundleManifest, DatasetManifest, load
from components.common.process.steplog import StepLog
from components.common.registry import trust
from components.common.registry.alias_changes import Proposal, change_aliases
from components.common.registry.model_registry import Registry
from components.common.registry.version_evaluation import load_standing
from components.gate.config import GateConfig
from components.gate.run import run as gate
from components.promote import champion
from enginery.release.fetch import fetch, read_identity
from tests.unit.release.making import write_keys

from .chains import make_chain, promote_chain
from .test_attacks import reseal
from .test_deploy import checkout, pins
from .test_registry_commands import enginery, register_forged
from .test_remeasuring import chain_on, register_on_other_images

__all__ = ["checkout"]  # a fixture
FUTURE, PAST = "2999-01-01", "2001-01-01"


class Machine:
    """A machine with a policy, and the people who have keys."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.keys = {name: write_keys(folder / name) for name in ("ci", "board", "stranger")}
        self.policy()

    def policy(self, *, environment: str = "", expires: str = FUTURE, newest: bool = False, **keys: Any) -> None:
        """Write it as the operator does. `keys`: rights of a name, in place of the usual ones."""
        usual: dict[str, Any] = {"ci": {"signs": ["verdict", "model"]}, "board": {"approves": ["prod", "staging"]}}
        told = {
            name: {"public_key": self.keys[name][1].read_text(), "expires": expires, **rights}
            for name, rights in {**usual, **keys}.items()
        }
        text = {"environment": environment, "keys": told}
        if newest:
            text["newest_approvals"] = str(self.folder / "newest.json")
        (self.folder / "trust.yaml").write_text(yaml.safe_dump(text))
        self.monkeypatch.setenv(trust.POLICY_VARIABLE, str(self.folder / "trust.yaml"))

    def key(self, name: str) -> Path:
        """The private one."""
        return self.keys[name][0]

    def judged(self, name: str, signer: str = "ci") -> dict[str, Path]:
        """A chain whose verdict the real gate wrote, with somebody's key."""
        paths = make_chain(self.folder / name, int(name.rpartition("-")[2]))
        config = load(paths["bundle"], BundleManifest)  # the bundle is there; the gate reads the report alone
        assert config.digest
        thresholds = json.loads((paths["verdict"] / "manifest.json").read_bytes())["config"]
        shutil.rmtree(paths["verdict"])
        with pytest.MonkeyPatch.context() as patch:
            if signer:
                patch.setenv(trust.KEY_VARIABLE, self.key(signer).read_text())  # as from a Secret
            gate(
                GateConfig.model_validate(thresholds), StepLog("gate"), report=paths["report"], output=paths["verdict"]
            )
        return paths

    def promote(self, uri: str, name: str) -> str:
        """The chain as a version of m."""
        return promote_chain(uri, self.judged(name), self.folder / name / "promotion")

    def approve(self, reference: str, environment: str, signer: str = "board") -> None:
        enginery("approve", reference, "--env", environment, "--key", str(self.key(signer)))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (tmp_path / "machine").mkdir()
    return Machine(tmp_path / "machine", monkeypatch)


@pytest.fixture
def promoted(machine: Machine, uri: str) -> Machine:
    machine.promote(uri, "a-050")
    return machine


def served(reference: str, target: Path, *options: str) -> Path:
    enginery("serve", "export", reference, str(target), *options)
    return target


def test_what_the_policy_trusts_goes_all_the_way(promoted: Machine, checkout: Path, tmp_path: Path) -> None:
    promoted.approve("m/1", "prod")
    promoted.policy(environment="prod")
    repository = served("m@champion", tmp_path / "repository", "--key", str(promoted.key("ci")))
    enginery("deploy", "--env", "prod", "m/1", "--repository", str(repository))
    fetch(str(repository), tmp_path / "pod", pins("prod").repository_digest)
    assert {"model.sig", "verdict.dsse.json", "approval-prod.dsse.json"} < {
        file.name for file in (tmp_path / "pod").iterdir()
    }


def test_without_a_policy_each_use_says_that_nobody_vouches(
    uri: str, checkout: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """promote, serve, deploy, fetch, release, verify and the Python model."""
    paths = make_chain(tmp_path / "a-050", 50)
    uses = (
        lambda: promote_chain(uri, paths, tmp_path / "promotion"),
        lambda: enginery("serve", "export", "m/1", str(tmp_path / "repository")),
        lambda: enginery("deploy", "--env", "dev", "m/1", "--repository", str(tmp_path / "repository")),
        lambda: fetch(str(tmp_path / "repository"), tmp_path / "pod", pins("dev").repository_digest),
    )
    for use in uses:
        done = use()
        told = capfd.readouterr().err + getattr(done, "output", "")
        assert "nobody vouches for it, since this machine has no trust policy" in told
    with pytest.raises(Exception, match=r"."):  # the bytes are no network; what is said comes before they are read
        mlflow.pyfunc.load_model("models:/m/1")
    assert "nobody vouches for it" in caplog.text


def test_a_verdict_that_nobody_signed_is_not_promoted(machine: Machine, uri: str) -> None:
    for signer, words in (
        ("", r"the gate signed no verdict \(verdict.dsse.json is not there\)"),
        ("stranger", "no key of the trust policy signed its verdict"),
        ("board", "by the trust policy the key board may not sign a verdict"),
    ):
        paths = machine.judged(f"by-{signer}-050", signer)
        with pytest.raises(EngineryError, match=words):
            promote_chain(uri, paths, machine.folder / f"promotion-{signer}")
    assert not MlflowClient(uri).search_model_versions("name = 'm'")


def test_a_registry_writer_without_a_key(promoted: Machine, uri: str, registry: Registry, tmp_path: Path) -> None:
    """A forged chain with tags and a forged entry in the log; then with the true verdict of version 1 beside it."""
    number = register_forged(registry, tmp_path / "f-099")
    digests = load_standing(tmp_path / "f-099/report", tmp_path / "f-099/verdict").digests
    entry = Proposal(kind="promote", aliases={"champion": number}, why="x", digests=digests)
    change_aliases(registry, "m", lambda situation: entry)
    commands = (
        ("serve", "export", "m@champion", str(tmp_path / "out")),
        ("release", str(tmp_path / "out"), f"m/{number}"),
        ("approve", f"m/{number}", "--env", "prod", "--key", str(promoted.key("board"))),
        ("promote", "m", number, "--to", "staging", "--why", "x", "--force"),
    )
    own = registry.statements(registry.version("m", "1"))["verdict.dsse.json"]
    for words in ("the gate signed no verdict", "verdict.dsse.json is about the bundle sha256:"):
        for command in commands:
            with pytest.raises(EngineryError, match=f"m version {number} is refused: {words}"):
                enginery(*command)
        registry.add_statement(registry.version("m", number), "verdict.dsse.json", own)
    assert not (tmp_path / "out").exists()


def test_every_byte_of_a_statement_counts(promoted: Machine, registry: Registry, tmp_path: Path) -> None:
    version = registry.version("m", "1")
    own = json.loads(registry.statements(version)["verdict.dsse.json"])
    forged = {
        **own,
        "payload": trust._signed("verdict", {}, {"passed": True}, trust.signing_key(promoted.key("stranger"))).decode()[
            12:40
        ],
    }
    stripped, untyped = {**own, "signatures": []}, {**own, "payloadType": "text/plain"}
    for statement in (forged, stripped, untyped):
        registry.add_statement(version, "verdict.dsse.json", json.dumps(statement).encode())
        with pytest.raises(EngineryError, match="m version 1 is refused"):
            served("m/1", tmp_path / "out")


def test_an_approval_for_staging_is_none_for_production(promoted: Machine, registry: Registry, tmp_path: Path) -> None:
    promoted.approve("m/1", "staging")
    promoted.policy(environment="staging")
    served("m/1", tmp_path / "staging")
    promoted.policy(environment="prod")
    with pytest.raises(EngineryError, match=r"nobody approved it for prod .*enginery approve"):
        served("m/1", tmp_path / "prod")
    version = registry.version("m", "1")
    replayed = registry.statements(version)["approval-staging.dsse.json"]
    registry.add_statement(version, "approval-prod.dsse.json", replayed)
    with pytest.raises(EngineryError, match="its approval is for staging, and this is prod"):
        served("m/1", tmp_path / "prod")
    promoted.policy(environment="prod", board={"approves": ["staging"]})
    promoted.approve("m/1", "prod")
    with pytest.raises(EngineryError, match="by the trust policy the key board may not approve for prod"):
        served("m/1", tmp_path / "prod")
    promoted.approve("m/1", "prod", signer="stranger")
    with pytest.raises(EngineryError, match="no key of the trust policy signed its approval"):
        served("m/1", tmp_path / "prod")
    assert not (tmp_path / "prod").exists()


def test_deploy_asks_for_the_approval_of_its_environment(promoted: Machine, checkout: Path, tmp_path: Path) -> None:
    repository = served("m/1", tmp_path / "repository", "--key", str(promoted.key("ci")))
    promoted.approve("m/1", "staging")
    enginery("deploy", "--env", "staging", "m/1", "--repository", str(repository))
    for command in (("m/1", "--repository", str(repository)), ("--from", "staging")):
        with pytest.raises(EngineryError, match="m version 1 is refused: nobody approved it for prod"):
            enginery("deploy", "--env", "prod", *command)
    assert not pins("prod").is_deployed
    (repository / "model.sig").unlink()
    with pytest.raises(EngineryError, match="is refused: it is not signed"):
        enginery("deploy", "--env", "staging", "m/1", "--repository", str(repository))


def test_an_expired_key_and_an_expired_approval(
    promoted: Machine, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted.policy(expires=PAST)
    with pytest.raises(EngineryError, match=f"the key ci that signed its verdict expired on {PAST}"):
        served("m/1", tmp_path / "out")
    promoted.policy()
    before = trust.now
    monkeypatch.setattr(trust, "now", lambda: (datetime.now(UTC) + timedelta(days=366)).strftime(trust._TIME))
    promoted.policy(environment="prod")
    version = registry.version("m", "1")
    with monkeypatch.context() as patch:
        patch.setattr(trust, "now", before)
        promoted.approve("m/1", "prod")
        served("m/1", tmp_path / "today")
    assert "approval-prod.dsse.json" in registry.statements(version)
    with pytest.raises(EngineryError, match="its approval ended"):
        served("m/1", tmp_path / "out")


def test_a_downgrade_to_an_older_approved_version(
    promoted: Machine, uri: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alias is put back to a version that was approved once: its signatures are all right."""
    promoted.promote(uri, "b-060")
    clock = iter(f"2026-01-0{day}T00:00:00Z" for day in range(1, 9))
    with monkeypatch.context() as patch:
        patch.setattr(trust, "now", lambda: next(clock))
        for number in ("1", "2"):
            promoted.approve(f"m/{number}", "prod")
    promoted.policy(environment="prod", newest=True)
    served("m/1", tmp_path / "first")
    served("m@champion", tmp_path / "second")
    registry.client.set_registered_model_alias("m", "champion", "1")
    with pytest.raises(EngineryError, match=r"this is an older version. To go back to it, approve it again"):
        served("m@champion", tmp_path / "out")
    promoted.approve("m/1", "prod")
    served("m@champion", tmp_path / "out")


def test_a_store_writer_against_the_pod(promoted: Machine, tmp_path: Path) -> None:
    """Repositories that were never signed, by strangers, and with files changed after the signature."""
    unsigned = served("m/1", tmp_path / "unsigned")
    foreign = served("m/1", tmp_path / "foreign", "--key", str(promoted.key("stranger")))
    wrong = served("m/1", tmp_path / "wrong", "--key", str(promoted.key("board")))
    changed = served("m/1", tmp_path / "changed", "--key", str(promoted.key("ci")))
    reseal(changed, "m_labels/1/model.py", b"import os\n")
    for store, words in (
        (unsigned, r"it is not signed \(model.sig is not there\)"),
        (foreign, "no key of the trust policy signed its model"),
        (wrong, "the key board may not sign a model"),
        (changed, "model.sig does not fit m_labels/1/model.py, manifest.json"),
    ):
        with pytest.raises(EngineryError, match=words):  # though the very digest is asked for
            fetch(str(store), tmp_path / "pod", read_identity(store).digest)
        with pytest.raises(EngineryError, match=words):
            enginery("serve", "start", str(store), "--http-port", "1")
        assert not (tmp_path / "pod").exists()


def test_a_signature_of_something_else_with_a_repository_added_to_it(promoted: Machine, tmp_path: Path) -> None:
    """All that the key signed is there, a release, and beside it what would be loaded."""
    forged, repository = tmp_path / "forged", served("m/1", tmp_path / "repository")
    shutil.copytree(repository, forged)
    (forged / "model.py").write_text("the only thing that was signed")
    signed = tmp_path / "signed"
    signed.mkdir()
    shutil.copy(forged / "model.py", signed)
    trust.sign_folder(signed, promoted.key("ci"))
    shutil.copy(signed / "model.sig", forged)
    digest = reseal(forged, "model.py", (forged / "model.py").read_bytes())
    with pytest.raises(EngineryError, match=r"model.sig does not cover m/1/README, .*"):
        fetch(str(forged), tmp_path / "pod", digest)


def test_a_policy_that_can_not_be_read_trusts_nothing(promoted: Machine, tmp_path: Path, monkeypatch) -> None:
    file = promoted.folder / "trust.yaml"
    for text in ("keys: 1", "[", "keys: {ci: {public_key: x, expires: 2030-01-01}}", "environments: prod\nkeys: {}"):
        file.write_text(text)
        with pytest.raises(UserError, match=r"the trust policy .* is not valid"):
            served("m/1", tmp_path / "out")
    monkeypatch.setenv(trust.POLICY_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="can't read the trust policy"):
        served("m/1", tmp_path / "out")
    monkeypatch.delenv(trust.POLICY_VARIABLE)
    (link := tmp_path / "default.yaml").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(trust, "DEFAULT_POLICY", link)
    with pytest.raises(UserError, match="can't read the trust policy"):
        served("m/1", tmp_path / "out")


def test_the_python_model(promoted: Machine, registry: Registry, tmp_path: Path) -> None:
    """It is asked before anything of the bundle is loaded: these bytes are no network, and nobody reads them."""
    promoted.policy(ci={"signs": ["model"]})
    with pytest.raises(EngineryError, match="the key ci may not sign a verdict"):
        mlflow.pyfunc.load_model("models:/m/1")


def test_a_forged_champion_is_not_run_to_be_measured_again(
    machine: Machine, registry: Registry, tmp_path: Path, digits_dataset: Artifact[DatasetManifest], monkeypatch
) -> None:
    """Tags, entry in the log and alias are right, as a registry writer makes them; `promote` would run its bundle."""
    register_on_other_images(registry, chain_on(tmp_path / "old", digits_dataset, 3, 99.0, split="of other images"))
    run: list[object] = []
    monkeypatch.setattr(champion, "_measure", lambda bundle, *_: run.append(bundle))
    version = registry.version("m", "1")
    with pytest.raises(EngineryError, match="m version 1 is refused: the gate signed no verdict"):
        champion.remeasure(registry, version, "int8", digits_dataset, lambda done, total: None, print)
    assert run == []
    machine.monkeypatch.delenv(trust.POLICY_VARIABLE)
    said: list[str] = []
    champion.remeasure(registry, version, "int8", digits_dataset, lambda done, total: None, said.append)
    assert "m version 1: nobody vouches for it" in said[0]
    bundle: Any = run[0]
    assert not bundle.path.exists()  # a copy, which is gone


@pytest.mark.parametrize("name", [trust.SIGNATURE, "more.dsse.json"])
def test_a_link_in_the_place_of_a_signature(machine: Machine, tmp_path: Path, name: str) -> None:
    """Where nothing is checked, as without a policy, and by who pushes: no other file of the machine comes along."""
    bundle = make_chain(tmp_path / "a-050", 50)["bundle"]
    trust.sign_folder(bundle, machine.key("ci"))
    public = machine.keys["ci"][1].read_text()
    assert trust.folder_problem(bundle, public) == ""
    (bundle / name).unlink(missing_ok=True)
    (tmp_path / "secret").write_text("of this machine")
    (bundle / name).symlink_to(tmp_path / "secret")
    if name != trust.SIGNATURE:
        assert "does not cover more.dsse.json" in trust.folder_problem(bundle, public)
    machine.monkeypatch.delenv(trust.POLICY_VARIABLE)
    fetch(str(bundle), tmp_path / "copy", read_identity(bundle).digest)
    assert not (tmp_path / "copy" / name).exists()
