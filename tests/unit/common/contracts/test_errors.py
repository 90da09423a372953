"""Foreign names and secrets of addresses, on their way to terminals and records, through the real commands."""

import ast
import json
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from pydantic import BaseModel, Field

from components.common.contracts.errors import EngineryError, holds_secret, shortened, shown, without_secrets
from components.common.contracts.settings import StepConfig, resolve
from components.merge.config import MergeConfig
from components.preprocess.config import PreprocessConfig
from enginery.cli.commands import cli
from enginery.formats import new_console
from tests.processes import ROOT, run_python
from tests.unit.refusals import refuses

ATTACK = "cat\x1b]0;owned\x07\x1b[2J\u202e\u200b\u3164"
SECRET = "AKIA0123456789SECRET"


def everything_written(folder: Path) -> str:
    return "".join(file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("text", "shown_text"),
    [("a\n b", "a b"), ("words and more", "words and ..."), ("word" * 9, f"{'word' * 9}"[:12] + " ...")],
)
def test_long_text_ends_behind_a_word(text: str, shown_text: str) -> None:
    assert shortened(text, 12) == shown_text


@pytest.mark.parametrize("command", ["components.preprocess", "enginery.cli.main"])
def test_folder_names_do_not_move_the_cursor(tmp_path: Path, command: str) -> None:
    (tmp_path / "images" / ATTACK).mkdir(parents=True)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "images" / ATTACK / "a.png")
    arguments = ["--output", str(tmp_path / "out")] if "preprocess" in command else []
    verb = [] if arguments else ["run", "pipelines/resnet50.py"]
    words = ["-m", command, *verb, "--data", tmp_path / "images", *arguments]
    done = run_python(*words, ENGINERY_HOME=str(tmp_path / "home"))
    assert done.returncode == 2
    assert "cat" in done.stdout + done.stderr
    assert not {"\x1b", "\x07", "\u202e", "\u200b", "\u3164"} & set(done.stdout + done.stderr)


@pytest.mark.parametrize(
    ("command", "uri"),
    [
        ("run", f"simplecache::https://{SECRET}@host/x.tar"),
        ("submit", f"https://host/x.tar?key={SECRET}"),
        ("preprocess", f"s3://me:{SECRET}@bucket/images"),
    ],
)
def test_a_secret_in_an_address_is_written_nowhere(tmp_path: Path, monkeypatch, command: str, uri: str) -> None:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    if command == "preprocess":
        done = run_python("-m", "components.preprocess", "--data", uri, "--output", tmp_path / "out")
        code, said = done.returncode, done.stdout + done.stderr
    else:
        options = ["--endpoint", "http://127.0.0.1:9"] if command == "submit" else []
        words = [command, str(ROOT / "pipelines/resnet50.py"), "--data", uri, *options]
        with pytest.raises(EngineryError) as caught:
            CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)
        code, said = caught.value.exit_code, str(caught.value)
    assert code == 2
    assert "holds a user, a password or a signature" in said
    assert SECRET not in said + everything_written(tmp_path)


def test_rich_keeps_its_own_controls(capsys: pytest.CaptureFixture[str]) -> None:
    console = new_console()
    console.print(f"[bold]{ATTACK}[/]", highlight=False)
    out = capsys.readouterr().out
    assert out == "cat\\x1b]0;owned\\x1b[2J\\u202e\\u200b\\u3164\n"  # rich itself drops \x07


def test_errors_hold_nothing_of_both() -> None:
    error = EngineryError(f"can't read {ATTACK}: 404, url='https://me:{SECRET}@host/x?sig={SECRET}'\nsecond line")
    assert str(error) == (
        "can't read cat\\x1b]0;owned\\x07\\x1b[2J\\u202e\\u200b\\u3164: 404, url='https://***@host/x?***'\nsecond line"
    )
    assert shown(str(error)) == str(error)
    assert json.dumps(shown("\udcff")) == '"\\\\udcff"'


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/a@b/images",
        "https://host/x.tar?download=1&version=main",
        "abfs://container@account.dfs.core.windows.net/images",
        "sqlite:////home/me@work/mlflow.db",
        "/data/a?key=b",
        "http://[::1]:8000/x.tar",
        "http://[::1]:8000/x@1/y.tar",
        "http://127.0.0.1:8000/a@b/x.tar",
        "http://localhost:5000/x@champion",
        "http://mlflow:5000/@here",
        "https://host.example:8443/x@1.tar",
        "http://minio:9000/bucket/x@y/z.tar",
        "//server/share/x@y",
        "hdfs:///user@work/images",
        "ssh://git@host/team/images",
        "sftp://annotation-team.readonly2@host/images",
        "hf://datasets/org/name@main",
        "s3://bucket/key@1;a=b.tar",
        "s3://bucket/class;key=1.png",
        "https://host/a;b@c.tar",
        "https://host/x;v=1/y.tar",
        "a;token=b@c.png",
        "https:host/x.tar",
        "me@host: see https://host/x@y.",
        "['s3://bucket/a@b','abfs://container@account/images']",
        "simplecache::s3://bucket/x@y.zip",
        f"oci://registry:5000/team/models@sha256:{'0a' * 32}",
    ],
)
def test_what_is_no_secret(uri: str) -> None:
    assert not holds_secret(uri)
    assert shown(uri) == uri


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (f"simplecache::https://{SECRET}@host/x.tar", "simplecache::https://***@host/x.tar"),
        (f"zip://a.png::https://{SECRET}@host/x.zip", "zip://a.png::https://***@host/x.zip"),
        (f"cache_https://{SECRET}@host", "cache_https://***@host"),
        (f"https://user:8/{SECRET}@host/x.tar", "https://***@host/x.tar"),
        (f"https://user.name:8/{SECRET}@host/x.tar", "https://***@host/x.tar"),
        (f"https://user:8?{SECRET}@host/x.tar", "https://***@host/x.tar"),
        (f"https://user:pa'{SECRET}@host", "https://***@host"),
        (f'https://user:pa"<{SECRET}@host', "https://***@host"),
        (f"https://host/x.tar;token={SECRET}", "https://host/x.tar;token=***"),
        (f"https://host/x.tar;v={SECRET}/y", "https://host/x.tar;v=***/y"),
        (f"s3://bucket/x.tar;token={SECRET}", "s3://bucket/x.tar;token=***"),
        (f"https://host/x?a=1;key={SECRET[:9]}", "https://host/x?***"),
        (f"https://host/x#key={SECRET}", "https://host/x#***"),
        (f"https:///{SECRET}@host/x.tar", "https:///***@host/x.tar"),
        (f"https:{SECRET}@host/x.tar", "https:***@host/x.tar"),
        (f"s3:KEY:{SECRET}@bucket/x.tar", "s3:***@bucket/x.tar"),
        (f"see HTTP:/u:{SECRET}@host", "see HTTP:/***@host"),
        (f"//{SECRET}@host/x.tar", "//***@host/x.tar"),
        (f"'//{SECRET}@host' is not there", "'//***@host' is not there"),
        (f"ssh://{SECRET}@host/x", "ssh://***@host/x"),
        (f"mssql+pyodbc:///?odbc_connect=PWD%3D{SECRET}", "mssql+pyodbc:///?***"),
        (f"see https://u:{SECRET}@host", "see https://***@host"),
        (f"file:///a https://{SECRET}@host", "file:///a https://***@host"),
        (f"'https://h/x@1','https://u:{SECRET}@host'", "'https://h/x@1','https://***@host'"),
    ],
)
def test_secrets_wherever_they_are_in_a_text(text: str, hidden: str) -> None:
    assert holds_secret(text)
    assert shown(text) == hidden
    with pytest.raises(ValueError, match="holds a user, a password or a signature") as caught:
        without_secrets(text)
    assert SECRET[:9] not in str(caught.value)


def test_a_long_text_is_looked_through_in_time() -> None:
    for part in ("a", "a://", "a://'", "a.", "a://@", ";a=", "http:"):
        started = time.process_time()
        shown("a://" + part * 100_000)
        assert time.process_time() - started < 10, part


def test_secrets_are_found_in_every_setting_however_deep_they_are() -> None:
    class Inner(BaseModel):
        names: dict[str, list[str]] = Field(default={})

    class Config(StepConfig):
        inner: Inner = Inner()
        pairs: dict[str, tuple[str, ...]] = Field(default={})

    uri = f"https://{SECRET}@host"
    for config, name, value, others in (
        (PreprocessConfig, "class_names_file", uri, {"data": "images"}),
        (MergeConfig, "parts", ["a", uri], {}),
        (Config, "inner", {"names": {"a": [uri]}}, {}),
        (Config, "pairs", {uri: ()}, {}),
        (Config, "pairs", {"a": ("b", uri)}, {}),
    ):
        with refuses("invalid-setting", f"step.{name}") as caught:
            resolve(config, "step", {name: value, **others})
        assert SECRET not in str(caught.value)


CODED = ("EngineryError", "UserError", "GateFailed", "RuntimeUnavailable")


def test_each_error_names_its_kind() -> None:
    raised = [
        (f"{path.relative_to(ROOT)}:{node.lineno}", [keyword.arg for keyword in node.exc.keywords])
        for folder in ("components", "enginery", "pipelines")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) in CODED
    ]
    assert len(raised) > 300
    assert [place for place, keywords in raised if "code" not in keywords] == []
