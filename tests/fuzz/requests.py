"""Damaged HTTP and gRPC requests to a running model server: each is answered or refused, and it goes on serving.

Used by tests/unit/serving/test_client.py and benchmarks/fuzz.py, which have a server.
"""

import json
import random
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import grpc
import psutil
from tritonclient.grpc import service_pb2

from tests.fuzz import images
from tests.fuzz.running import MAX_SECONDS

_BATCH = 50
_NUM_SENDERS = 8
_QUIET_S = 0.1  # without a byte of an answer: the server waits for what a damaged length promises
_INFER = "/inference.GRPCInferenceService/ModelInfer"

Protocol = Literal["http", "grpc"]


def request(number: int, seed: int, model: str) -> bytes:
    """Case `number`: an inference request, damaged in its image, its JSON, or anywhere."""
    chance = random.Random(f"{seed}:{number}")
    data = _element(number, seed, chance)
    head = bytearray(_head(data))
    if chance.random() < 0.4:
        _damage(head, chance)
    odd = chance.choice(("-1", "0", "99999999999999999999", "x", "")) if chance.random() < 0.1 else str(len(head))
    whole = bytearray(_post(model, odd, bytes(head), data))
    if chance.random() < 0.4:
        _damage(whole, chance)
    return bytes(whole)


def message(number: int, seed: int, model: str) -> bytes:
    """Case `number`: a serialized gRPC message, damaged in its image or anywhere."""
    chance = random.Random(f"{seed}:{number}")
    whole = bytearray(_message(model, _element(number, seed, chance)))
    if chance.random() < 0.7:
        _damage(whole, chance)
    return bytes(whole)


def _message(model: str, data: bytes) -> bytes:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="IMAGE", datatype="BYTES", shape=[1, 1])
    asked = service_pb2.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[data])
    return bytes(asked.SerializeToString())


def _element(number: int, seed: int, chance: random.Random) -> bytes:
    """An image as an element of a tensor of bytes."""
    image = chance.choice(images.originals())
    if chance.random() < 0.5:
        image = images.damaged(number, seed, images.originals())
    return struct.pack("<I", len(image)) + image


def _damage(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.choice((1, 2, 8))):
        start = chance.randrange(len(data)) if data else 0
        end = min(len(data), start + chance.choice((1, 4, 32)))
        way = chance.randrange(4)
        if way == 0 and data:
            data[start] ^= 1 << chance.randrange(8)
        elif way == 1:
            del data[start:end]
        elif way == 2:
            data[start:start] = data[start:end] * chance.choice((1, 1, 100))
        else:
            data[start:end] = chance.randbytes(end - start)


def send(port: int, data: bytes) -> bytes:
    """The start of the answer; empty where the server waits for more, or closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=MAX_SECONDS) as connection:
        try:
            connection.sendall(data)
            connection.settimeout(_QUIET_S)
            return connection.recv(1 << 16)
        except OSError:  # a reset, too
            return b""


def run_requests(
    num_cases: int, seed: int, port: int, model: str, server: int, protocol: Protocol = "http"
) -> tuple[dict[int, str], dict[int, str], int]:
    """Send all cases to a server.

    Args:
        num_cases: how many.
        seed: of the damage.
        port: of the protocol, on this machine.
        model: that takes images.
        server: number of the process whose children the server's processes are.
        protocol: that is spoken.

    Returns:
        What went wrong, by case; answers to good requests that were those of others before, by case; and by how many
        bytes the server's processes grew.
    """
    wrong: dict[int, str] = {}
    foreign: dict[int, str] = {}
    before = _server_bytes(server)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(_INFER)  # of bytes as they are
        check = (
            (lambda number: _http_problem(send(port, request(number, seed, model))))
            if protocol == "http"
            else (lambda number: _grpc_problem(_status(call, message(number, seed, model))))
        )

        def judge(number: int) -> None:
            for _ in range(2):  # a machine that was busy or stopped is slow once
                started = time.monotonic()
                problem = check(number)
                if (seconds := time.monotonic() - started) <= MAX_SECONDS:
                    break
                problem = f"took {seconds:.0f} s"
            if problem:
                wrong[number] = problem

        for start in range(0, num_cases, _BATCH):
            numbers = range(start, min(num_cases, start + _BATCH))
            with ThreadPoolExecutor(_NUM_SENDERS) as senders:
                list(senders.map(judge, numbers))
            for _ in range(2):
                answer = (
                    str(_patient(port, _good(model)))
                    if protocol == "http"
                    else _status(call, _message(model, _sound())).name
                )
                if good := " 200 OK" in answer or answer == "OK":
                    break
                foreign[start] = answer  # if that is over the second time
            if not good:
                wrong[start] = f"a good request after the cases {start} to {numbers[-1]} was answered {answer[:200]}"
                break
    return wrong, foreign, _server_bytes(server) - before


def _http_problem(answer: bytes) -> str:
    """Triton repeats the version that it was sent."""
    return f"answered {answer[:80]!r}" if answer and not answer.startswith(b"HTTP/") else ""


def _grpc_problem(status: grpc.StatusCode) -> str:
    """A server that died is UNAVAILABLE."""
    return status.name if status in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE) else ""


def _status(call: Callable[..., bytes], data: bytes) -> grpc.StatusCode:
    try:
        call(data, timeout=MAX_SECONDS)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def _good(model: str) -> bytes:
    data = _sound()
    head = _head(data)
    return _post(model, str(len(head)), head, data)


def _head(data: bytes) -> bytes:
    tensor = {"name": "IMAGE", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": len(data)}}
    return json.dumps({"inputs": [tensor]}).encode()


def _post(model: str, length_of_head: str, head: bytes, data: bytes) -> bytes:
    lines = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    lines += f"Inference-Header-Content-Length: {length_of_head}\r\nContent-Length: {len(head) + len(data)}\r\n\r\n"
    return lines.encode() + head + data


def _sound() -> bytes:
    image = images.originals()[0]
    return struct.pack("<I", len(image)) + image


def _patient(port: int, data: bytes) -> bytes:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=MAX_SECONDS) as connection:
            connection.sendall(data)
            return connection.recv(1 << 16)
    except OSError as error:
        return str(error).encode()


def _server_bytes(server: int) -> int:
    children = psutil.Process(server).children(recursive=True)
    return sum(child.memory_info().rss for child in children)
