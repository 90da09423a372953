"""A translator as MLflow loads it and as `enginery predict` asks it: text in and out, and what is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import BundleManifest, load
from components.common.tasks.translation.runners import Translator, open_translator
from components.common.tasks.translation.sentences import on_one_line, read_sentence, translate_each
from components.promote.packaging import write_model
from enginery.cli.predict import predict
from tests.unit.refusals import refuses
from tests.unit.registered import enginery, reseal
from tests.unit.shapes import Chain

SENTENCES = ["12 May", "half past seven"]
BAD: list[tuple[str | bytes, str]] = [
    ("", "empty-sentence"),
    (" \t \u3000", "empty-sentence"),
    ("\u200b \u200f", "empty-sentence"),
    ("word " * 10_000, "sentence-too-long"),
    ("seven " * 260, "sentence-too-long"),
    (b"caf\xe9", "not-utf8"),
    (b"\xff\xfea\x00", "not-utf8"),
    ("a\x00b", "control-character"),
    ("a\x1b[31mb", "control-character"),
    ("a\u202eb", "control-character"),
    ("one\ntwo", "control-character"),
    ("half a pair: \ud800", "not-utf8"),
]


@pytest.fixture(scope="module")
def opened(translator: Chain) -> Iterator[Translator]:
    int8 = open_translator(load(translator.bundle, BundleManifest), "int8")
    yield int8
    int8.close()


@pytest.mark.parametrize(("sentence", "code"), BAD)
def test_a_bad_sentence_spoils_no_translations(sentence: str | bytes, code: str, opened: Translator) -> None:
    first, refused, last = translate_each(opened, [SENTENCES[0], sentence, SENTENCES[1].encode()])
    assert isinstance(refused, UserError)
    assert refused.code == code
    assert [first, last] == opened.translate(SENTENCES)


def test_a_sentence_is_taken_in_nfc() -> None:
    assert read_sentence(" cafe\u0301 ", "it") == "caf\u00e9"


def test_mlflow_loads_a_translator(translator: Chain, opened: Translator, tmp_path: Path) -> None:
    shutil.copytree(translator.bundle, tmp_path / "model" / "bundle")
    folder = write_model(load(translator.bundle, BundleManifest), "int8", tmp_path / "model")
    with refuses("plans-unusable"):
        mlflow.pyfunc.load_model(str(folder), model_config={"runtime": "tensorrt"})
    model = mlflow.pyfunc.load_model(str(folder))
    said = opened.translate(SENTENCES)
    forms: list[Any] = [SENTENCES, pd.DataFrame({"text": SENTENCES}), pd.Series(SENTENCES), {"text": SENTENCES}]
    assert [list(model.predict(form)["translation"]) for form in forms] == [said] * len(forms)
    for form in forms[1:3]:
        form.index = range(9, 9 - len(SENTENCES), -1)
        assert list(model.predict(form).index) == list(form.index)
    assert model.predict(SENTENCES[0], params={"beam_size": 2}).shape == (1, 1)
    assert model.metadata.signature.outputs.input_names() == ["translation"]
    refused: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, "no-sentence"),
        ([SENTENCES[0], 3], {}, "not-a-sentence"),
        ([SENTENCES[0], ""], {}, "empty-sentence"),
        (SENTENCES, {"beam_size": 0}, "invalid-beam-size"),
        (pd.DataFrame({"a": ["x"], "b": ["y"]}), {}, "no-column"),
        (np.array([b"half past seven"]), {}, "fixed-width-bytes"),
    ]
    for sent, params, code in refused:
        with refuses(code) as caught:
            model._model_impl.predict(sent, params)
        assert "image" not in str(caught.value)


def test_predict_translates_arguments_and_lines(translator: Chain, opened: Translator, tmp_path: Path) -> None:
    bundle, said = str(translator.bundle), opened.translate(SENTENCES)
    lines = enginery("predict", bundle, *SENTENCES).stdout.split("\n")
    assert lines == [*map(on_one_line, said), ""]
    content = b"\xef\xbb\xbf12 May\r\n\ncaf\xe9\nhalf past seven\n"
    done = CliRunner().invoke(predict, [bundle, "-", "--json"], input=content)
    results = json.loads(done.stdout)["results"]
    assert [entry.get("translation") for entry in results] == [said[0], None, None, said[1]]
    assert "sentence 2: it is empty" in done.stderr
    assert "sentence 3: it is not UTF-8" in done.stderr
    assert isinstance(done.exception, UserError)
    assert done.exception.code == "sentences-without-answer"
    nothing = CliRunner().invoke(predict, [bundle, "-"], input=b"")
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    with refuses("no-sentences"):
        enginery("predict", bundle)
    (tmp_path / "in.txt").write_bytes(content)
    with refuses("file-not-sentence"):
        enginery("predict", bundle, tmp_path / "in.txt")
    for option, value in (("--top-k", 3), ("--picture", "x.png")):
        with refuses("other-task", option):
            enginery("predict", bundle, option, value, *SENTENCES)


def test_a_line_of_output_has_no_control_characters_and_keeps_what_languages_need() -> None:
    said = "\u05d0\u200f: http://a/?token=12345678901234567"
    assert on_one_line(f"{said}\n\x1b\u202e") == f"{said}   "


def test_inspect_shows_what_each_precision_says(translator: Chain, opened: Translator) -> None:
    sentences = [part for text in SENTENCES for part in ("--sentence", text)]
    results = json.loads(enginery("inspect", "--bundle", translator.bundle, *sentences, "--json").stdout)["results"]
    assert [(one["sentence"], one["precision"]) for one in results] == [
        (text, precision) for text in SENTENCES for precision in ("fp32", "int8")
    ]
    assert [one["translation"] for one in results if one["precision"] == "int8"] == opened.translate(SENTENCES)
    with refuses("empty-sentence"):
        enginery("inspect", "--bundle", translator.bundle, "--sentence", "")


def test_inspect_names_a_precision_that_does_not_run_here(translator: Chain, tmp_path: Path) -> None:
    bundle = shutil.copytree(translator.bundle, tmp_path / "bundle")
    reseal(bundle, lambda record: record["models"].update(fp16="int8.onnx", fp16_encoder="int8_encoder.onnx"))
    results = json.loads(enginery("inspect", "--bundle", bundle, "--sentence", "12 May", "--json").stdout)["results"]
    assert [(one["precision"], one["runtime"], "translation" in one) for one in results] == [
        ("fp32", "openvino", True),
        ("fp16", "n/a", False),
        ("int8", "openvino", True),
    ]
    assert "FP16: no file of FP16 for CPUs" in enginery("inspect", "--bundle", bundle, "--sentence", "12 May").stdout
