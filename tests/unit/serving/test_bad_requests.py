"""Wrong requests to a real Triton: one clear answer, and the server goes on."""

import socket
import struct
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from .conftest import NAME, encoded, kept_busy, metrics, picture, wait_until_pending


@pytest.fixture(autouse=True)
def _goes_on(served) -> Iterator[None]:
    """After each test the server answers, and its log holds no trace and none of the bytes that were sent."""
    before = served.log.stat().st_size
    yield
    assert served.infer([picture()]).status == 200
    assert served.process.poll() is None
    assert served.log.read_bytes()[before:] == b""


def bomb_png(width: int, height: int) -> bytes:
    """A PNG whose header alone says how large it is: it is to be refused before anything is decoded."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def of_image(data: bytes, count: int = 1) -> tuple[str, str, list[int], bytes]:
    return "IMAGE", "BYTES", [count, 1], encoded([data] * count)


def logits(*values: float) -> tuple[str, str, list[int], bytes]:
    return "logits", "FP32", [1, 10], struct.pack("<10f", *values)


INF = float("inf")
INFINITE = "the model's answer to image 0 is infinite: it names no class"
NETWORK = ("images", "FP32", [1, 3, 16, 16], bytes(4 * 3 * 16 * 16))
NAN = "the model's answer to image 0 is not a number (NaN): it names no class"
TOO_LONG = ("IMAGE", "BYTES", [1, 1], struct.pack("<I", 1000) + b"abc")


@pytest.mark.parametrize(
    ("sent", "model", "message"),
    [
        (of_image(b"hello"), "", "image 0 is not an image; take a JPEG, PNG, WebP, BMP or TIFF"),
        (of_image(b""), "", "image 0 is not an image"),
        (of_image(b"version https://git-lfs.github.com/spec/v1"), "", "image 0 is a pointer of Git LFS"),
        (of_image(picture()[:300]), "", "image 0 is damaged"),
        (of_image(picture(form="GIF")), "", "image 0 is not an image; take a JPEG"),
        (of_image(b"\xff\xd8" + b"\xa5" * 1000), "", "image 0 is not an image"),
        (of_image(bomb_png(30_000, 30_000)), "", "image 0 is too large: at most 100,000,000 pixels are taken"),
        (of_image(bomb_png(10_001, 10_000)), "", "image 0 is too large: 100,010,000 pixels"),
        (of_image(picture((101, 1), "PNG")), "", "image 0 has 101x1 pixels"),  # which would be made larger
        (("IMAGE", "BYTES", [3, 1], encoded([picture(), picture(form="PNG"), b"text"])), "", "image 2 is not an image"),
        (("IMAGE", "FP32", [1, 1], bytes(4)), "", "data-type is 'FP32', but model 'digits' expects 'BYTES'"),
        (("IMAGE", "BYTES", [1], encoded([b"abc"])), "", "Expected [-1,1], got [1]"),
        (of_image(b"abc", 200), "", "batch-size must be <= 128"),
        (("PICTURE", *of_image(b"abc")[1:]), "", "unexpected inference input 'PICTURE'"),
        (TOO_LONG, "", "expecting string of length 1000"),
        (("IMAGE", "BYTES", [1, 1], b"ab"), "", "incomplete string length indicator"),
        (("IMAGE", "BYTES", [2, 1], encoded([b"abc"])), "", "expected 2 string elements"),
        (NETWORK, "_model", "Expected [-1,3,32,32], got [1,3,16,16]"),
        (logits(*[float("nan")] * 10), "_labels", NAN),
        (logits(*[INF] * 10), "_labels", INFINITE),
        (logits(INF, *[0.0] * 9), "_labels", INFINITE),
        (logits(*[-INF] * 10), "_labels", INFINITE),
    ],
)
def test_wrong_tensors(served, sent, model: str, message: str) -> None:
    answer = served.send(*sent, NAME + model)
    assert (answer.status, message in answer.error) == (400, True), answer


def test_200_megabytes(served) -> None:
    answer = served.infer([b"\xff\xd8" + bytes(200_000_000)])
    assert answer.status == 400
    assert "image 0 has 200,000,002 bytes, and 67,108,864 are taken at most; make it smaller" in answer.error


def test_two_million_chunks_of_a_byte(served) -> None:
    """For each of which Triton 2.51 takes 16 bytes of a stack (CVE-2025-23310)."""
    head = f"POST /v2/models/{NAME}/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", served.http), timeout=600) as client:
        client.sendall(head.encode() + b"1\r\nx\r\n" * 2_000_000 + b"0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 ")
    assert served.infer([picture()]).status == 200


def test_a_class_that_is_ruled_out_is_an_answer(served) -> None:
    answer = served.send(*logits(*[-INF] * 9, 1.0), f"{NAME}_labels")
    assert (answer.output("LABELS")[0], answer.output("PROBABILITIES")[0]) == ("9", 1.0)


def test_a_bad_image_fails_nobody_else(served) -> None:
    """Requests that the server puts together into batches are answered each on its own."""
    data = [b"bad" if index % 3 == 0 else picture() for index in range(90)]
    before = metrics(served)
    with ThreadPoolExecutor(30) as pool, kept_busy(served, 4):  # so that batches form, however fast
        sent = pool.map(lambda image: served.infer([image]), data)
        wait_until_pending(served, 20)
    answers = list(sent)
    expected = [400 if index % 3 == 0 else 200 for index in range(90)]
    assert [answer.status for answer in answers] == expected, {str(a.body)[:300] for a in answers if a.status > 400}
    after = metrics(served)
    images, batches = (
        sum(after[name] - before[name] for name in after if name.startswith(f'{series}{{model="{NAME}_preprocess"'))
        for series in ("nv_inference_count", "nv_inference_exec_count")
    )
    assert batches < images  # they did form


def test_an_unknown_model_and_no_json(served) -> None:
    answer = served.infer([picture()], "nobody")
    assert (answer.status, "unknown model: 'nobody'" in answer.error) == (404, True), answer
    answer = served.post(NAME, b"{", {})
    # Triton's own answer, though the client is at fault.
    assert (answer.status, "failed to parse the request JSON" in answer.error) == (500, True), answer


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("v2/logging", lambda client: client.update_log_settings({"log_verbose_level": 1})),
        ("v2/trace/setting", lambda client: client.update_trace_settings(settings={"trace_level": ["TIMESTAMPS"]})),
        ("v2/systemsharedmemory/region/a/register", lambda client: client.register_system_shared_memory("a", "/a", 1)),
    ],
)
def test_what_only_the_operator_may(served, path: str, call: Callable[[grpc.InferenceServerClient], object]) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{served.http}/{path}", b"{}"), timeout=600)
    assert refused.value.code == 403
    with pytest.raises(InferenceServerException, match="restricted"):
        call(grpc.InferenceServerClient(f"127.0.0.1:{served.grpc}"))


def test_a_client_that_goes_away(served) -> None:
    body = encoded([picture((3000, 3000))])
    tensor = b'{"name":"IMAGE","datatype":"BYTES","shape":[1,1],"parameters":{"binary_data_size":%d}}' % len(body)
    head = b'{"inputs":[%s]}' % tensor
    request = b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n" % len(head)
    request += b"Content-Length: %d\r\n\r\n" % (len(head) + len(body)) + head + body

    def leave(length: int) -> None:
        with socket.create_connection(("127.0.0.1", served.http)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no goodbye
            client.sendall(request[:length])

    threads = [threading.Thread(target=leave, args=(length,)) for length in (50, len(request) // 2, len(request)) * 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
