"""A small RTSP server on loopback: H.264 over one TCP connection, as cameras send it."""

import base64
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import av
import numpy as np

_MOST_BYTES = 1400  # of a packet's payload
_RATE = 30  # frames per second


def encoded(frames: list[np.ndarray]) -> Iterator[list[bytes]]:
    """The NAL units of each frame; every frame is a key frame, so that a client may join at any time."""
    context = av.CodecContext.create("libx264", "w")
    height, width = frames[0].shape[:2]
    context.width, context.height, context.pix_fmt, context.framerate = width, height, "yuv420p", _RATE
    context.options = {"tune": "zerolatency", "g": "1", "preset": "ultrafast"}
    for pixels in frames:
        for packet in context.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")):
            yield [unit for unit in re.split(rb"\x00\x00\x00?\x01", bytes(packet)) if unit]


class RtspServer:
    """Sends the frames over and over in real time. A context. `cut` drops the clients; `paused` sends nothing."""

    def __init__(self, frames: list[np.ndarray], login: str = "") -> None:
        self.units = list(encoded(frames))
        self.login = login
        self.requests: list[str] = []
        self.paused = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._clients: list[socket.socket] = []
        self._stopped = threading.Event()

    @property
    def url(self) -> str:
        return f"rtsp://127.0.0.1:{self.port}/cam"

    def __enter__(self) -> "RtspServer":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._socket.close()
        self.cut()

    def cut(self) -> None:
        for client in self._clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
            client.close()
        self._clients.clear()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self._clients.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        lines = client.makefile("rb")
        try:
            while (first := lines.readline().decode()).strip():
                headers = {}
                while line := lines.readline().decode().strip():
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                self.requests.append(first)
                method = first.split()[0]
                wanted = "Basic " + base64.b64encode(self.login.encode()).decode()
                if self.login and method == "DESCRIBE" and headers.get("authorization") != wanted:
                    head = 'RTSP/1.0 401 Unauthorized\r\nWWW-Authenticate: Basic realm="cam"\r\n'
                    client.sendall(f"{head}CSeq: {headers['cseq']}\r\n\r\n".encode())
                    continue
                body = self._sdp() if method == "DESCRIBE" else ""
                more = {
                    "OPTIONS": "Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN\r\n",
                    "DESCRIBE": f"Content-Type: application/sdp\r\nContent-Length: {len(body)}\r\n",
                    "SETUP": "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 1\r\n",
                    "PLAY": "Session: 1\r\n",
                }.get(method, "")
                client.sendall(f"RTSP/1.0 200 OK\r\nCSeq: {headers['cseq']}\r\n{more}\r\n{body}".encode())
                if method == "PLAY":
                    threading.Thread(target=self._play, args=(client,), daemon=True).start()
        except (OSError, ValueError):
            pass

    def _sdp(self) -> str:
        sets = [base64.b64encode(unit).decode() for unit in self.units[0] if unit[0] & 31 in (7, 8)]
        return (
            "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=cam\r\nt=0 0\r\nm=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\n"
            f"a=fmtp:96 packetization-mode=1;sprop-parameter-sets={','.join(sets)}\r\na=control:track1\r\n"
        )

    def _play(self, client: socket.socket) -> None:
        sequence, began, index = 0, time.monotonic(), 0
        try:
            while not self._stopped.is_set():
                if self.paused.is_set():
                    time.sleep(0.02)
                    continue
                time.sleep(max(0.0, began + index / _RATE - time.monotonic()))
                units = self.units[index % len(self.units)]
                for unit in units:
                    for payload, ends in _payloads(unit):
                        marker = 0x80 if ends and unit is units[-1] else 0
                        clock = index * 90_000 // _RATE
                        rtp = struct.pack("!BBHII", 0x80, marker | 96, sequence & 0xFFFF, clock & 0xFFFFFFFF, 1)
                        client.sendall(struct.pack("!cBH", b"$", 0, len(rtp) + len(payload)) + rtp + payload)
                        sequence += 1
                index += 1
        except OSError:
            pass


def _payloads(unit: bytes) -> Iterator[tuple[bytes, bool]]:
    """RFC 6184: a NAL unit as one packet, or as fragments."""
    if len(unit) <= _MOST_BYTES:
        yield unit, True
        return
    rest = unit[1:]
    for start in range(0, len(rest), _MOST_BYTES):
        is_last = start + _MOST_BYTES >= len(rest)
        flags = (0x80 if start == 0 else 0) | (0x40 if is_last else 0)
        yield bytes([unit[0] & 0xE0 | 28, flags | unit[0] & 31]) + rest[start : start + _MOST_BYTES], is_last
