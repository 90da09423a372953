"""A translator behind a real Triton: the sentences of Python's own translator, and requests that are refused."""

from concurrent.futures import ThreadPoolExecutor

from components.common.contracts.manifests import BundleManifest, DatasetManifest, load
from components.common.tasks.translation.runners import open_translator
from components.export.translation import read_pairs
from tests.unit.shapes import Chain

from .conftest import Answer, Running, encoded, serving

MODEL = "phrases"


def translate(running: Running, *sentences: bytes) -> Answer:
    return running.send("TEXT", "BYTES", [len(sentences), 1], encoded(sentences), MODEL)


def test_the_server_translates_as_the_bundle_and_refuses_the_rest(triton: None, translator: Chain, tmp_path) -> None:
    sources = [source for source, _ in read_pairs(load(translator.dataset, DatasetManifest), "val")[:24]]
    expected = open_translator(load(translator.bundle, BundleManifest), "int8").translate(sources)
    with serving(translator.bundle, tmp_path, "--name", MODEL) as running:
        assert translate(running, *(source.encode() for source in sources)).output("TRANSLATION") == expected
        bad = (b"", b"\xff\xfe", b"a\x00b", b"word " * 10_000, "\u202e".join("ab").encode())
        with ThreadPoolExecutor(8) as pool:  # beside those that are answered
            refused = [pool.submit(translate, running, b"a", each) for each in bad]
            alone = [pool.submit(translate, running, source.encode()) for source in sources]
        assert [answer.result().output("TRANSLATION") for answer in alone] == [[each] for each in expected]
        for answer in refused:
            assert answer.result().status == 400
            assert answer.result().error.startswith("sentence 2 ")
