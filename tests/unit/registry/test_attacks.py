"""Each attack against each use of a model: a table of what refuses it, and with which code."""

import base64
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import mlflow
import pytest

import enginery as public
from components.common.contracts.errors import EngineryError
from components.common.registry import trust
from components.common.registry.model_registry import Registry
from enginery.release.fetch import fetch, read_identity
from tests.helm.rendering import case, named, render_files
from tests.unit.registered import PARTS, PAST, Machine, enginery, files, flip, pins, promote_chain, refuses

APPROVAL = trust.approval_file("prod")


@functools.cache
def rendered_init_container(digest: str) -> dict[str, Any]:
    values = case("full")
    model = {"uri": "", "existingClaim": "models", "repositoryDigest": digest}
    values["serve"]["model"] = {**values["serve"]["model"], **model}
    pod = named(render_files(values), "Deployment", "serve")["spec"]["template"]["spec"]
    (container,) = pod["initContainers"]
    return dict(container)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Version 1 of m, its signed model repository in a store, and the chain that it was made from: all of it right."""

    machine: Machine
    store: str
    chain: Mapping[str, Path]  # folders by part, the dataset's among them
    version: Path  # the registry's files
    repository: Path
    digest: str  # of the repository
    out: Path  # a new folder for each use

    def init_container(self) -> None:
        """The command that the chart has a pod run before Triton, on the mounted store."""
        container = rendered_init_container(self.digest)
        verb, source, target, *rest = container["args"]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted > {"/store", "/models", "/etc/enginery/trust"}
        assert Path(source).is_relative_to("/store")
        assert Path(target).is_relative_to("/models")
        enginery(verb, self.repository, self.out / "models", *rest)

    def use(self, name: str) -> None:
        {
            "promote": lambda: promote_chain(self.store, dict(self.chain), self.out / "promotion"),
            "alias": lambda: enginery("promote", "m", "1", "--to", "other", "--why", "x", "--force"),
            "release": lambda: enginery("release", self.out / "release", "m/1"),
            "serve": lambda: enginery("serve", "export", "m/1", self.out / "models"),
            "load": lambda: public.load_model("m/1"),
            "deploy": lambda: enginery("deploy", "--env", "prod", "m/1", "--repository", self.repository),
            "fetch": lambda: fetch(str(self.repository), self.out / "pod", self.digest),
            "start": lambda: enginery("serve", "start", self.repository, "--http-port", "1"),
            "init container": self.init_container,
            "pyfunc": lambda: mlflow.pyfunc.load_model("models:/m/1"),  # not-onnx, where bytes are loaded first
        }[name]()


REGISTRY = ("alias", "release", "serve", "load", "deploy")
STORE = ("fetch", "start", "init container")
USES = ("promote", *REGISTRY, *STORE, "pyfunc")
APPROVED = tuple(name for name in USES if name not in ("promote", "alias"))  # by which a version gets somewhere


@pytest.fixture
def scene(trusted: Machine, store: str, registry: Registry, checkout: Path, tmp_path: Path) -> Scene:
    trusted.approve("m/1", "prod")
    with registry.files(registry.version("m", "1"), "bundle") as bundle:
        version = bundle.parent
    enginery("serve", "export", "m/1", tmp_path / "store")
    signed = {file: file.read_bytes() for file in (tmp_path / "store").glob(trust.STATEMENTS)}
    for file in signed:  # so that the folder's signature does not cover them: a change of theirs is theirs alone
        file.unlink()
    trust.sign_folder(tmp_path / "store", trusted.key("ci"))
    for file, data in signed.items():
        file.write_bytes(data)
    chain = {part: trusted.folder / "a-050" / part for part in (*PARTS, "dataset")}
    return Scene(
        machine=trusted,
        store=store,
        chain=chain,
        version=version,
        repository=tmp_path / "store",
        digest=read_identity(tmp_path / "store").digest,
        out=tmp_path / "out",
    )


# --- attacks: each says what it changes; afterwards all is as before

Attack = Callable[[Scene], Any]


def policy(**changed: Any) -> Attack:
    """Another policy: as if what is there had been signed by somebody else, or elsewhere, or long ago."""

    @contextmanager
    def attack(scene: Scene) -> Iterator[None]:
        scene.machine.policy(**{"environment": "prod", **changed})
        yield
        scene.machine.policy(environment="prod")

    return attack


@contextmanager
def by_a_stranger(scene: Scene) -> Iterator[None]:
    keys = scene.machine.keys
    own, keys["ci"] = keys["ci"], keys["stranger"]
    with policy()(scene):
        keys["ci"] = own
        yield


def statements(change: Callable[[Path], object]) -> Attack:
    """Signed statements changed wherever they lie."""

    @contextmanager
    def attack(scene: Scene) -> Iterator[None]:
        folders = (scene.chain["verdict"], scene.version, scene.repository)
        before = {file: file.read_bytes() for folder in folders for file in folder.glob(trust.STATEMENTS)}
        assert len(before) == 5  # an approval comes after the gate
        for folder in folders:
            change(folder)
        yield
        for folder in folders:
            for file in folder.glob(trust.STATEMENTS):
                file.unlink()
        for file, data in before.items():
            file.write_bytes(data)

    return attack


@contextmanager
def changed_model(scene: Scene) -> Iterator[None]:
    """One bit of the network, and of the program in the model repository."""
    own = [scene.chain["bundle"] / "int8.onnx", scene.version / "bundle/int8.onnx"]
    own.append(scene.repository / "m_preprocess/1/model.py")
    for file in own:
        flip(file)
    yield
    for file in own:
        flip(file)


def other_fields(**changed: Any) -> Callable[[Path], None]:
    """Other values in the verdict, under the signature of the true one."""

    def change(folder: Path) -> None:
        envelope = json.loads((folder / trust.VERDICT).read_bytes())
        statement = json.loads(base64.b64decode(envelope["payload"]))
        payload = base64.b64encode(json.dumps({**statement, **changed}).encode()).decode()
        (folder / trust.VERDICT).write_text(json.dumps({**envelope, "payload": payload}))

    return change


def approval_renamed(folder: Path) -> None:
    if (folder / APPROVAL).is_file():
        (folder / APPROVAL).rename(folder / trust.approval_file("staging"))


@contextmanager
def for_staging(scene: Scene) -> Iterator[None]:
    """The approval for prod, under the name of one for staging, where staging runs."""
    with statements(approval_renamed)(scene), policy(environment="staging")(scene):
        yield


@contextmanager
def a_year_later(scene: Scene) -> Iterator[None]:
    later = (datetime.now(UTC) + timedelta(days=366)).strftime(trust._TIME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trust, "utc_now", lambda: later)
        yield


@contextmanager
def newer_was_seen(scene: Scene) -> Iterator[None]:
    (scene.machine.folder / "newest.json").write_text('{"prod/m": "2998-01-01T00:00:00Z"}')
    with policy(newest=True)(scene):
        yield


@contextmanager
def unsigned(scene: Scene) -> Iterator[None]:
    signature = (scene.repository / trust.SIGNATURE).read_bytes()
    (scene.repository / trust.SIGNATURE).unlink()
    with statements(lambda folder: (folder / trust.VERDICT).unlink())(scene):
        yield
    (scene.repository / trust.SIGNATURE).write_bytes(signature)


@dataclass(frozen=True, kw_only=True)
class Row:
    attack: Attack
    code: str  # by which the uses refuse it
    uses: tuple[str, ...] = USES
    others: Mapping[str, str] = field(default_factory=dict)  # other codes, by use


ATTACKS = {
    "nobody signed": Row(attack=unsigned, code="no-verdict", others=dict.fromkeys((*STORE, "deploy"), "not-signed")),
    "a key that is not in the policy": Row(attack=by_a_stranger, code="key-unknown"),
    "an expired key": Row(attack=policy(expires=PAST), code="key-expired"),
    "a key that may not sign verdicts": Row(attack=policy(ci={"signs": ["model"]}), code="key-without-right"),
    "a key that may not sign folders": Row(
        attack=policy(ci={"signs": ["verdict"]}), code="key-without-right", uses=("deploy", *STORE)
    ),
    "a key that may not approve": Row(
        attack=policy(board={"approves": ["staging"]}), code="key-without-right", uses=APPROVED
    ),
    "another file": Row(attack=changed_model, code="damaged-artifact", others=dict.fromkeys(STORE, "file-damaged")),
    "another field of a statement": Row(
        attack=statements(other_fields(predicate={"passed": True, "more": 1})), code="statement-changed"
    ),
    "another subject of a statement": Row(attack=statements(other_fields(subject=[])), code="statement-changed"),
    "an approval that is gone": Row(
        attack=statements(lambda folder: (folder / APPROVAL).unlink(missing_ok=True)), code="no-approval", uses=APPROVED
    ),
    "an approval replayed in another environment": Row(
        attack=for_staging,
        code="approval-other-environment",
        uses=tuple(name for name in APPROVED if name != "deploy"),  # which is told its environment
    ),
    "an approval that ended": Row(attack=a_year_later, code="approval-expired", uses=APPROVED),
    "a downgrade to an older approval": Row(attack=newer_was_seen, code="approval-older", uses=APPROVED),
}


def test_each_attack_is_refused_by_each_use(scene: Scene, registry: Registry) -> None:
    scene.machine.policy(environment="prod")
    before = files(scene.repository), files(scene.version)
    found: dict[tuple[str, str], str] = {}
    for title, row in ATTACKS.items():
        for name in row.uses:
            scene.out.mkdir()
            with row.attack(scene):
                try:
                    scene.use(name)
                    found[title, name] = "nothing"
                except EngineryError as error:
                    found[title, name] = error.code
            assert name == "promote" or not [*scene.out.iterdir()], (title, name)
            shutil.rmtree(scene.out, ignore_errors=True)
    expected = {(title, name): row.others.get(name, row.code) for title, row in ATTACKS.items() for name in row.uses}
    assert {key: (code, expected[key]) for key, code in found.items() if code != expected[key]} == {}
    assert [version.number for version in registry.versions("m")] == ["1"]
    assert "other" not in registry.aliases("m")
    after = files(scene.repository), files(scene.version)
    assert after[0] == before[0]
    assert after[1].items() >= before[1].items()  # MLflow adds a file of its own to what it loads
    scene.use("deploy")  # as before, it goes all the way
    fetch(str(scene.repository), scene.out / "pod", pins("prod").repository_digest)
    assert {"model.sig", "verdict.dsse.json", "approval-prod.dsse.json"} < files(scene.out / "pod").keys()


@pytest.mark.parametrize(
    ("name", "module", "code"),
    [
        ("promote", "components.promote.run", "damaged-artifact"),  # as it lies in the registry then
        ("serve", "enginery.serving.sources", "changed-file"),
        ("fetch", "enginery.release.fetch", ""),  # what was checked is its own copy
    ],
)
def test_a_link_swapped_between_check_and_use(scene: Scene, monkeypatch, name: str, module: str, code: str) -> None:
    own = [scene.chain["bundle"] / "int8.onnx", scene.version / "bundle/int8.onnx"]
    own.append(scene.repository / "m_preprocess/1/model.py")
    before, checked = files(scene.repository), []
    for file in own:
        file.rename(file.with_suffix(".original"))
        file.symlink_to(file.with_suffix(".original").name)

    def check(*arguments: Any, **options: Any) -> None:
        trust.check_chain(*arguments, **options)
        checked.append(arguments)
        for file in own:
            file.unlink()
            file.write_bytes(b"another")

    monkeypatch.setattr(f"{module}.check_chain", check)
    scene.out.mkdir()
    with refuses(code) if code else nullcontext():
        scene.use(name)
    assert len(checked) == 1
    assert name in ("promote", "fetch") or not [*scene.out.iterdir()]
    if not code:
        assert files(scene.out / "pod") == before
