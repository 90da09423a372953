"""deploy: what is written and committed, what goes from one environment to the next, what is refused."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from components.common.contracts.digests import digest_file
from components.common.contracts.errors import EngineryError, GateFailed
from components.common.contracts.manifests import BundleManifest, load
from components.common.registry.model_registry import Registry
from enginery.release.deploy import Pins, set_values
from enginery.release.fetch import fetch
from tests.unit.registered import deploy, enginery, exported, flip, git, pins, refuses, register_failed, replace_file

SERVE = "sha256:" + "5e" * 32


def values(name: str) -> Path:
    return Path(f"helm/environments/{name}/values.yaml")


def digest_of(folder: Path) -> str:
    return load(folder / "bundle", BundleManifest).digest


def untouched() -> bool:
    return git("status", "--porcelain", "--", "helm") == ""


def test_deployed_promoted_and_rolled_back_as_commits(checkout: Path, three: str, made_once: Path, tmp_path) -> None:
    before = values("staging").read_text()
    Path("staged.txt").write_text("somebody's work")
    git("add", "staged.txt")

    for version in ("1", "2"):
        deploy("staging", f"m/{version}")
    done = deploy("staging", "m/3", "--image", f"ghcr.io/enginery/serve@{SERVE}", "--why", "better")
    assert done.output.startswith("Deploy m version 3 to staging (")
    assert pins("staging") == Pins(
        model="m",
        version="3",
        digest=digest_of(made_once / "c-060"),
        repository_digest=digest_file(exported("m/3") / "manifest.json"),
        images={"serve": SERVE},
        serving=True,
    )
    message = git("log", "-1", "--format=%B")
    assert message.startswith("Deploy m version 3 to staging\n\nWhy: better\n\nBundle sha256:")
    assert "@champion" in message
    assert git("show", "--format=", "--name-only", "HEAD").split() == [str(values("staging"))]
    assert git("status", "--porcelain", "--", "helm", "staged.txt").split() == ["A", "staged.txt"]
    lines = zip(before.splitlines(), values("staging").read_text().splitlines(), strict=True)
    # image, enabled, name, version, two digests; every comment is where it was
    assert sum(old != new for old, new in lines) == 6

    count = git("rev-list", "--count", "HEAD")
    assert "nothing to commit" in deploy("staging", "m/3").output
    assert git("rev-list", "--count", "HEAD") == count

    enginery("deploy", "--env", "prod", "--from", "staging")
    assert pins("prod") == pins("staging")
    for version in ("2", "1"):
        done = enginery("deploy", "--env", "staging", "--rollback")
        assert f"Roll back staging to m version {version}" in done.output
        assert (pins("staging").version, pins("staging").images) == (version, {})
    with refuses("no-past"):
        enginery("deploy", "--env", "staging", "--rollback")
    git("clone", "--quiet", "--depth", "1", f"file://{checkout}", str(tmp_path / "shallow"))
    with refuses("no-past") as caught:  # of the checkout
        enginery("deploy", "--env", "prod", "--rollback", "--directory", tmp_path / "shallow/helm/environments")
    assert "git fetch --unshallow" in str(caught.value)
    assert "--repository DIR" in str(caught.value), "without which it is refused"
    deploy("staging", "m/3")
    enginery("deploy", "--env", "staging", "--rollback")
    assert (pins("staging").version, pins("prod").version) == ("1", "3")
    checked = enginery("deploy", "--check").output.splitlines()
    assert checked[0] == "dev serves no model"
    assert checked[1].startswith("prod serves m version 3, which passed its gate (sha256:")


def test_ci_refuses_what_was_written_manually(checkout: Path, three: str, registry: Registry, tmp_path: Path) -> None:
    number = register_failed(registry, tmp_path / "f-099")
    with pytest.raises(GateFailed, match="did not pass its gate"):
        enginery("deploy", "--env", "dev", f"m/{number}", "--repository", exported("m/1"))
    assert not pins("dev").is_deployed
    assert untouched()

    def edited(name: str, old: str, new: str) -> None:
        assert old in values(name).read_text()
        values(name).write_text(values(name).read_text().replace(old, new))
        git("commit", "--quiet", "--all", "--message", "manually")

    deploy("dev", "m/1")
    deploy("staging", "m/1")
    enginery("deploy", "--check")
    edited("dev", pins("dev").digest, digest_of(tmp_path / "f-099"))
    edited("staging", 'version: "1"', f'version: "{number}"')
    with pytest.raises(GateFailed) as caught:
        enginery("deploy", "--check")
    dev, staging = str(caught.value).splitlines()
    assert dev.startswith("dev: dev serves sha256:")
    assert staging.startswith(f"staging: m version {number} did not pass its gate")
    for command in (("--env", "prod", "--from", "dev"), ("--check", "--env", "dev")):
        with pytest.raises(GateFailed, match="the registry has"):
            enginery("deploy", *command)
    edited("dev", 'version: "1"', 'version: "77"')
    with pytest.raises(EngineryError, match="m has no version 77"):
        enginery("deploy", "--check", "--env", "dev")


def test_a_version_of_changed_files_in_the_registry(checkout: Path, three: str, registry: Registry, tmp_path) -> None:
    command = ("deploy", "--env", "dev", "m/1", "--repository", exported("m/1"))
    others = (
        ("rollback", "m"),
        ("promote", "m", "1", "--why", "x", "--force"),
        ("serve", "export", "m/1", tmp_path / "out"),
        ("release", tmp_path / "out", "m/1"),
    )
    for part, file in (("bundle", "int8.onnx"), ("report", "predictions.npz"), ("verdict", "manifest.json")):
        with registry.files(registry.version("m", "1"), part) as folder:
            shutil.copytree(folder, tmp_path / part)
            flip(folder / file)
            for use in (command, *others):
                with pytest.raises(EngineryError) as caught:
                    enginery(*use)
                assert caught.value.code in ("damaged-artifact", "invalid-manifest", "broken-seal"), use
            shutil.copytree(tmp_path / part, folder, dirs_exist_ok=True)
            replace_file(folder, "more.txt", b"x")  # with a seal that fits
            with refuses("not-as-registered"):
                enginery(*command)
            shutil.copytree(tmp_path / part, folder, dirs_exist_ok=True)
            (folder / "more.txt").unlink()  # another test's store, too
    assert not pins("dev").is_deployed
    assert not (tmp_path / "out").exists()
    assert registry.aliases("m")["champion"] == "3"
    enginery(*command)
    assert pins("dev").version == "1"


@pytest.mark.parametrize(
    ("arguments", "code", "setting"),
    [
        (("--env", "qa", "m/1"), "no-environment", "--env"),
        (("m/1",), "no-environment", "--env"),
        (("m/1", "--env", "dev", "--directory", "helm"), "no-environment", "--directory"),
        (("--env", "dev"), "nothing-named", ""),
        (("--env", "dev", "m/1"), "no-repository", "--repository"),
        (("--env", "dev", "m/9", "--repository", "x"), "no-version", ""),
        (("--env", "dev", "m@lost", "--repository", "x"), "no-alias", ""),
        (("--env", "dev", "nobody/1", "--repository", "x"), "no-model", ""),
        (("--env", "dev", "--from", "dev"), "same-environment", "--from"),
        (("--env", "dev", "--from", "prod"), "nothing-deployed", ""),
        (("--env", "dev", "--rollback"), "no-past", ""),
        (("--env", "dev", "--rollback", "--check"), "conflicting-options", ""),
        (("--env", "dev", "--rollback", "m/1"), "conflicting-options", ""),
        (("--env", "dev", "--image", "ghcr.io/team/serve:1"), "invalid-image", "--image"),
        (("--env", "dev", "--image", f"ghcr.io/team/train@{SERVE}"), "invalid-image", "--image"),
        (("--env", "dev", "--image", f"ghcr.io/team/serve@{SERVE}"), "other-image-registry", "--image"),
    ],
)
def test_mistakes(checkout: Path, three: str, arguments: tuple[str, ...], code: str, setting: str) -> None:
    with refuses(code, setting):
        enginery("deploy", *arguments)
    assert untouched()


def test_the_repository_is_that_of_the_version(checkout: Path, three: str, tmp_path: Path) -> None:
    deploy("dev", "m/1")
    forged = shutil.copytree(exported("m/1"), tmp_path / "store")
    replace_file(forged, "m_labels/1/model.py", b"import os\n")
    assert json.loads((forged / "manifest.json").read_bytes())["inputs"]["bundle"] == pins("dev").digest
    for version, repository in (("1", forged), ("2", exported("m/1"))):
        with refuses("other-repository", "--repository"):
            enginery("deploy", "--env", "staging", f"m/{version}", "--repository", repository)
    assert not pins("staging").is_deployed
    for digest in (pins("dev").digest, pins("dev").repository_digest):  # whatever the chart asks for
        with refuses("other-digest"):
            fetch(str(forged), tmp_path / "pod", digest)


def test_what_git_has_against_it(checkout: Path, three: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = values("dev").read_text()
    values("dev").write_text(before + "# a note\n")
    with refuses("uncommitted-changes"):
        deploy("dev", "m/1")
    values("dev").write_text(before)
    hook = Path(".git/hooks/pre-commit")
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho 'sign it first' >&2\nexit 1\n")
    hook.chmod(0o755)
    with refuses("commit-refused", says="sign it first"):
        deploy("dev", "m/1")
    assert values("dev").read_text() == before
    Path(".git/index.lock").touch()
    with refuses("commit-refused", says="take its change back by git checkout"):
        deploy("dev", "m/1")
    Path(".git/index.lock").unlink()
    git("checkout", "--quiet", "--", str(values("dev")))
    git("checkout", "--quiet", "--detach")
    with refuses("detached-head"):
        deploy("dev", "m/1")
    assert git("rev-list", "--count", "--all").strip() == "1"
    assert untouched()
    enginery("deploy", "--check")  # as CI runs it

    plain = tmp_path / "plain"
    (plain / "helm").mkdir(parents=True)
    Path("helm/environments").rename(plain / "helm/environments")
    monkeypatch.chdir(plain)
    with refuses("no-checkout"):
        deploy("dev", "m/1")
    git("init", "--quiet")
    with refuses("not-in-git"):
        deploy("dev", "m/1")


def test_a_file_that_is_no_utf8(checkout: Path, three: str) -> None:
    deploy("dev", "m/1")
    before = values("dev").read_bytes()
    values("dev").write_bytes(before + b"# caf\xe9\n")
    git("commit", "--quiet", "--all", "--message", "a note")
    for words in (("dev", "m/2"), ("dev", "m/2", "--image", f"serve@sha256:{64 * '0'}")):
        with refuses("unreadable-file"):
            deploy(*words)
    values("dev").write_bytes(before)
    git("commit", "--quiet", "--all", "--message", "as before")
    deploy("dev", "m/2")
    enginery("deploy", "--env", "dev", "--rollback")  # past that commit
    assert pins("dev").version == "1"


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
        ("serve: [1]\n", "value-not-settable"),
        ("serve: {}\n", "value-not-settable"),
        ("base: &b {model: {digest: x}}\nserve: *b\n", "value-not-settable"),
        ("- 1\n", "invalid-yaml"),
        ("a: [\n", "invalid-yaml"),
        ("a: " + 1500 * "[", "invalid-yaml"),  # deeper than Python goes
        ("images: &s {digests: *s}\n", "invalid-yaml"),  # which holds itself
    ],
)  # fmt: skip
def test_one_value_is_set_and_the_rest_stays_or_all_of_it(text: str, wanted: str) -> None:
    with nullcontext() if ":" in wanted else refuses(wanted):
        assert set_values(text, {("serve", "model", "digest"): "d"}, "values.yaml") == wanted
        assert yaml.safe_load(wanted)["serve"]["model"]["digest"] == "d"
