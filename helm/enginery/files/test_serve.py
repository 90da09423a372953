"""Check that Triton answers a known image with its label, over the KServe protocol. Needs Python alone."""

import base64
import json
import os
import struct
import sys
import time
import urllib.error
import urllib.request

URL, MODEL = os.environ["TRITON_URL"], os.environ["MODEL"]
TIMEOUT_S = 60
# Network plugins take seconds to let a new pod's address through a policy; until then they refuse it.
LET_IN_BY = time.monotonic() + float(os.environ.get("WAIT_S", "60"))


def fail(reason: str) -> None:
    sys.exit(f"FAILED {MODEL} at {URL}: {reason}")


def ask(path: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
    request = urllib.request.Request(URL + path, data=data, headers=headers or {})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            fail(f"{path} answers {error.code}: {error.read()[:500]!r}")
        except OSError as error:
            if time.monotonic() > LET_IN_BY:
                fail(f"{path}: {error}")
            time.sleep(1)


def named_bytes(tensors: list[dict], what: str) -> dict:
    """The one tensor of bytes: encoded image in, label out."""
    found = [tensor for tensor in tensors if tensor["datatype"] == "BYTES"]
    if len(found) != 1:
        fail(f"{what} of type BYTES: {[tensor['name'] for tensor in found]}; exactly one is needed")
    return found[0]


def main() -> None:
    ask(f"/v2/models/{MODEL}/ready")
    metadata = json.loads(ask(f"/v2/models/{MODEL}"))
    source = named_bytes(metadata["inputs"], "inputs")
    target = named_bytes(metadata["outputs"], "outputs")
    image = base64.b64decode(os.environ["IMAGE"], validate=True)
    # An element of type BYTES in binary form: its length, 4 bytes little-endian, then itself.
    body = struct.pack("<I", len(image)) + image
    request = {
        "inputs": [
            {
                "name": source["name"],
                "shape": [1] * len(source["shape"]),
                "datatype": "BYTES",
                "parameters": {"binary_data_size": len(body)},
            }
        ],
        "outputs": [{"name": target["name"], "parameters": {"binary_data": False}}],
    }
    header = json.dumps(request).encode()
    headers = {"Inference-Header-Content-Length": str(len(header)), "Content-Type": "application/octet-stream"}
    answer = json.loads(ask(f"/v2/models/{MODEL}/infer", header + body, headers))
    (output,) = (tensor for tensor in answer["outputs"] if tensor["name"] == target["name"])
    label, wanted = str(output["data"][0]), os.environ["LABEL"]
    if label != wanted:
        fail(f"the known image is {wanted!r}, and the model says {label!r}")
    print(f"ok {MODEL} says {label!r}", flush=True)


main()
