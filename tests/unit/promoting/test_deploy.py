"""deploy: what is written and committed, what goes from one environment to the next, what is refused."""

import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from components.common.contracts.digests import digest_file
from components.common.contracts.errors import EngineryError, GateFailed, UserError
from components.common.contracts.manifests import BundleManifest, load
from components.common.registry.model_registry import Registry
from enginery.release.deploy import Pins, environments, set_values

from .chains import make_and_promote
from .test_registry_commands import enginery, register_failed

ROOT = Path(__file__).resolve().parents[3]
SERVE = "sha256:" + "5e" * 32


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the environments of ours, as the current directory."""
    root = tmp_path / "gitops"
    for file in (ROOT / "helm/environments").rglob("values.yaml"):
        copy = root / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        copy.write_bytes(file.read_bytes())
    monkeypatch.chdir(root)
    for name, value in (("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_AUTHOR_NAME", "t"), ("GIT_AUTHOR_EMAIL", "t@e.x"),
                        ("GIT_COMMITTER_NAME", "t"), ("GIT_COMMITTER_EMAIL", "t@e.x")):  # fmt: skip
        monkeypatch.setenv(name, value)
    git("init", "--quiet", "--initial-branch=main")
    git("add", "--all")
    git("commit", "--quiet", "--message", "Environments")
    return root


def pins(name: str) -> Pins:
    return environments(Path("helm/environments"))[name].read()


def exported(reference: str) -> str:
    """A model repository of a version, as `--repository` takes it."""
    folder = Path("..", f"repository-{reference.replace('/', '-').replace('@', '-')}").resolve()
    if not folder.exists():
        enginery("serve", "export", reference, str(folder))
    return str(folder)


def deploy(env: str, reference: str, *more: str) -> Result:
    return enginery("deploy", "--env", env, reference, "--repository", exported(reference), *more)


def digest_of(folder: Path) -> str:
    return load(folder / "bundle", BundleManifest).digest


def test_deployed_promoted_and_rolled_back_as_commits(checkout: Path, uri: str, tmp_path: Path) -> None:
    for name in ("a-050", "b-060", "c-070"):
        make_and_promote(uri, tmp_path, name)
    file = Path("helm/environments/staging/values.yaml")
    before = file.read_text()
    Path("staged.txt").write_text("somebody's work")
    git("add", "staged.txt")

    for version in ("1", "2"):
        deploy("staging", f"m/{version}")
    image = f"ghcr.io/enginery/serve@{SERVE}"
    done = deploy("staging", "m/3", "--image", image, "--why", "better")
    assert done.output.startswith("Deploy m version 3 to staging (")
    assert pins("staging") == Pins(
        model="m",
        version="3",
        digest=digest_of(tmp_path / "c-070"),
        repository_digest=digest_file(Path(exported("m/3"), "manifest.json")),
        images={"serve": SERVE},
        serving=True,
    )
    message = git("log", "-1", "--format=%B")
    assert message.startswith("Deploy m version 3 to staging\n\nWhy: better\n\nBundle sha256:")
    assert "@champion" in message
    assert git("show", "--format=", "--name-only", "HEAD").split() == [str(file)]
    assert git("status", "--porcelain", "--", "helm", "staged.txt").split() == ["A", "staged.txt"]
    changed = [
        pair for pair in zip(before.splitlines(), file.read_text().splitlines(), strict=True) if len(set(pair)) > 1
    ]
    assert len(changed) == 6  # image, enabled, name, version, two digests; every comment is where it was

    count = git("rev-list", "--count", "HEAD")
    assert "nothing to commit" in deploy("staging", "m/3").output
    assert git("rev-list", "--count", "HEAD") == count

    enginery("deploy", "--env", "prod", "--from", "staging")
    assert pins("prod") == pins("staging")
    assert "as it runs in staging" in git("log", "-1", "--format=%s")
    for version in ("2", "1"):
        assert (
            f"Roll back staging to m version {version}" in enginery("deploy", "--env", "staging", "--rollback").output
        )
        assert pins("staging").version == version
        assert pins("staging").images == {}
    with pytest.raises(UserError, match="staging served m version 1 and nothing before"):
        enginery("deploy", "--env", "staging", "--rollback")
    deploy("staging", "m/3")
    enginery("deploy", "--env", "staging", "--rollback")
    assert pins("staging").version == "1"
    assert pins("prod").version == "3"
    checked = enginery("deploy", "--check").output.splitlines()
    assert checked[0] == "dev serves no model"
    assert checked[1].startswith("prod serves m version 3, which passed its gate (sha256:")


def test_the_repository_is_named_and_of_this_version(checkout: Path, uri: str, tmp_path: Path) -> None:
    for name in ("a-050", "b-060"):
        make_and_promote(uri, tmp_path, name)
    with pytest.raises(UserError, match="name the model repository that serves m/1"):
        enginery("deploy", "--env", "dev", "m/1")
    with pytest.raises(EngineryError, match=r"is not what `enginery serve export` writes for m version 2: .*int8.onnx"):
        enginery("deploy", "--env", "dev", "m/2", "--repository", exported("m/1"))
    assert not pins("dev").is_deployed


def test_a_failed_gate_is_never_deployed(checkout: Path, uri: str, registry: Registry, tmp_path: Path) -> None:
    make_and_promote(uri, tmp_path, "a-050")
    number = register_failed(registry, tmp_path / "f-099")
    with pytest.raises(GateFailed, match=f"m version {number} did not pass its gate"):
        enginery("deploy", "--env", "dev", f"m/{number}", "--repository", exported("m/1"))
    assert not pins("dev").is_deployed
    assert git("status", "--porcelain", "--", "helm") == ""


def edited(name: str, old: str, new: str) -> None:
    file = Path(f"helm/environments/{name}/values.yaml")
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    git("commit", "--quiet", "--all", "--message", "by hand")


def test_ci_refuses_what_was_written_by_hand(checkout: Path, uri: str, registry: Registry, tmp_path: Path) -> None:
    make_and_promote(uri, tmp_path, "a-050")
    number = register_failed(registry, tmp_path / "f-099")
    deploy("dev", "m/1")
    deploy("staging", "m/1")
    enginery("deploy", "--check")
    edited("dev", digest_of(tmp_path / "a-050"), digest_of(tmp_path / "f-099"))
    edited("staging", 'version: "1"', f'version: "{number}"')
    with pytest.raises(GateFailed) as caught:
        enginery("deploy", "--check")
    dev, staging = str(caught.value).splitlines()
    assert dev.startswith("dev: dev serves sha256:")
    assert "the registry has" in dev
    assert staging.startswith(f"staging: m version {number} did not pass its gate")
    with pytest.raises(GateFailed, match="the registry has"):
        enginery("deploy", "--check", "--env", "dev")
    with pytest.raises(GateFailed, match="the registry has"):
        enginery("deploy", "--env", "prod", "--from", "dev")
    edited("dev", 'version: "1"', 'version: "77"')
    with pytest.raises(UserError, match="m has no version 77"):
        enginery("deploy", "--check", "--env", "dev")


def test_files_that_were_changed_in_the_registry(checkout: Path, uri: str, registry: Registry, tmp_path: Path) -> None:
    make_and_promote(uri, tmp_path, "a-050")
    exported("m/1")
    with registry.files(registry.version("m", "1"), "bundle", "int8.onnx") as file:
        file.write_bytes(file.read_bytes()[::-1])
    with pytest.raises(EngineryError, match="was changed after it was sealed"):
        deploy("dev", "m/1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--env", "qa", "m/1"), "there is no environment 'qa' in helm/environments; there are dev, prod, staging"),
        (("m/1",), "name one environment: --env dev|prod|staging"),
        (("--env", "dev"), "name what to deploy"),
        (("--env", "dev", "m/9", "--repository", "x"), "m has no version 9"),
        (("--env", "dev", "m@lost", "--repository", "x"), "m has no alias lost"),
        (("--env", "dev", "nobody/1", "--repository", "x"), "there is no registered model 'nobody'"),
        (("--env", "dev", "--from", "dev"), "--from and --env are both dev"),
        (("--env", "dev", "--from", "prod"), "prod serves no model"),
        (("--env", "dev", "--rollback"), "dev served no model and nothing before"),
        (("--env", "dev", "--rollback", "--check"), "--check and --rollback do not go with each other"),
        (("--env", "dev", "--rollback", "m/1"), "--rollback does not go with a model"),
        (("--env", "dev", "--image", "ghcr.io/team/serve:1"), "by digest, such as"),
        (("--env", "dev", "--image", f"ghcr.io/team/train@{SERVE}"), "(cli, mlflow, serve)"),
        (("--env", "dev", "--image", f"ghcr.io/team/serve@{SERVE}"), "dev pulls from images.registry ghcr.io/enginery"),
        (("--env", "dev", "m/1", "--directory", "helm"), "helm holds no environments"),
    ],
)
def test_mistakes(checkout: Path, three: str, arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError) as caught:
        enginery("deploy", *arguments)
    assert words in str(caught.value)
    assert git("status", "--porcelain", "--", "helm") == ""


def test_what_git_has_against_it(checkout: Path, three: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path("helm/environments/dev/values.yaml")
    before = file.read_text()
    file.write_text(before + "# a note\n")
    with pytest.raises(UserError, match=r"has changes that are not committed \(M\).*git checkout --"):
        deploy("dev", "m/1")
    file.write_text(before)
    hook = Path(".git/hooks/pre-commit")
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho 'sign it first' >&2\nexit 1\n")
    hook.chmod(0o755)
    with pytest.raises(EngineryError, match="which is now as before: sign it first"):
        deploy("dev", "m/1")
    assert file.read_text() == before
    assert git("status", "--porcelain", "--", "helm") == ""

    plain = tmp_path / "plain"
    (plain / "helm").mkdir(parents=True)
    Path("helm/environments").rename(plain / "helm/environments")
    monkeypatch.chdir(plain)
    with pytest.raises(UserError, match="is in no git repository"):
        deploy("dev", "m/1")
    git("init", "--quiet")
    with pytest.raises(UserError, match="is not in git yet; commit it first"):
        deploy("dev", "m/1")


def test_a_commit_on_no_branch_would_be_lost(checkout: Path, three: str) -> None:
    git("checkout", "--quiet", "--detach")
    with pytest.raises(UserError, match=r"is on no branch .*git switch BRANCH"):
        deploy("dev", "m/1")
    assert git("rev-list", "--count", "--all").strip() == "1"
    assert git("status", "--porcelain", "--", "helm") == ""
    enginery("deploy", "--check")  # as CI runs it


def test_a_rollback_in_a_checkout_without_its_past(checkout: Path, three: str, tmp_path: Path) -> None:
    for version in ("1", "2"):
        deploy("dev", f"m/{version}")
    git("clone", "--quiet", "--depth", "1", f"file://{checkout}", str(tmp_path / "shallow"))
    directory = str(tmp_path / "shallow/helm/environments")
    with pytest.raises(UserError, match=r"has the last ones alone\. Fetch the others \(git fetch --unshallow\)"):
        enginery("deploy", "--env", "dev", "--rollback", "--directory", directory)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", 'serve:\n  model:\n    digest: "d"\n'),
        ("# only this\n", '# only this\nserve:\n  model:\n    digest: "d"\n'),
        ("a: 1 # one\n", 'a: 1 # one\nserve:\n  model:\n    digest: "d"\n'),
        ("serve:\n  # above\n  kind: Rollout # why\n# below\nb: 2\n",
         'serve:\n  # above\n  kind: Rollout # why\n  model:\n    digest: "d"\n# below\nb: 2\n'),
        ("serve:\n    model:\n        digest:   old   # was\n", 'serve:\n    model:\n        digest:   "d"   # was\n'),
        ("serve: {model: {digest: ''}}\n", 'serve: {model: {digest: "d"}}\n'),
        ("serve:\n  model:\n    digest:\n", 'serve:\n  model:\n    digest: "d"\n'),
    ],
)  # fmt: skip
def test_one_value_is_set_and_the_rest_stays(text: str, wanted: str) -> None:
    assert set_values(text, {("serve", "model", "digest"): "d"}, "values.yaml") == wanted
    assert yaml.safe_load(wanted)["serve"]["model"]["digest"] == "d"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("serve: [1]\n", "can't be set in values.yaml, line 1"),
        ("serve: {}\n", "can't be set in values.yaml, line 1"),
        ("- 1\n", "holds a list"),
        ("a: [\n", "is no YAML"),
        ("base: &b {model: {digest: x}}\nserve: *b\n", "can't be set in place"),
    ],
)
def test_files_that_are_left_alone(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        set_values(text, {("serve", "model", "digest"): "d"}, "values.yaml")
    assert words in str(caught.value)
