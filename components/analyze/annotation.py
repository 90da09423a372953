"""A stream with its labels drawn in, as an MP4 file."""

import os
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

_CODECS = ("libx264", "mpeg4")  # the first that this FFmpeg has
_CLOCK = 90_000  # ticks of a second


class AnnotatedVideo:
    """Written frame by frame; whole at any time, since MP4 fragments stand by themselves.

    Not to be used after an error: FFmpeg breaks the process off where a header that failed is written again.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_name(f".{path.name}.part")
        self._file = self._partial.open("wb")  # FFmpeg's own files are closed in silence on a full disk
        options = {"movflags": "frag_keyframe+empty_moov"}
        self._container = av.open(self._file, "w", format="mp4", options=options)
        self._stream: av.VideoStream | None = None
        self._last_pts = -1

    def write(self, picture: Image.Image, time_s: float, text: str) -> None:
        """Add a frame, RGB, with a line of text unless that is empty. Scaled, if of another size than the first."""
        if self._stream is None:
            codec = next(name for name in _CODECS if name in av.codecs_available)
            self._stream = cast(av.VideoStream, self._container.add_stream(codec, rate=30))
            self._stream.width, self._stream.height = (max(2, side // 2 * 2) for side in picture.size)
            self._stream.pix_fmt = "yuv420p"
            self._stream.time_base = self._stream.codec_context.time_base = Fraction(1, _CLOCK)
        titled = _titled(picture, text) if text else picture
        frame = av.VideoFrame.from_ndarray(np.asarray(titled), format="rgb24")
        frame = frame.reformat(self._stream.width, self._stream.height, "yuv420p")
        self._last_pts = max(self._last_pts + 1, round(time_s * _CLOCK))
        frame.pts, frame.time_base = self._last_pts, Fraction(1, _CLOCK)
        for packet in self._stream.encode(frame):
            self._container.mux(packet)

    def close(self) -> None:
        """Complete the file, if there was a frame."""
        if self._stream is not None:
            for packet in self._stream.encode(None):
                self._container.mux(packet)
        self._container.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._stream is None:
            self._partial.unlink(missing_ok=True)
        else:
            os.replace(self._partial, self._path)


def _titled(picture: Image.Image, text: str) -> Image.Image:
    """The picture with a line of text on a dark bar at its top."""
    image = picture.copy()
    size = max(10, image.height // 24)
    font = ImageFont.load_default(size)
    draw = ImageDraw.Draw(image, "RGBA")
    draw.rectangle((0, 0, image.width, round(1.6 * size)), fill=(0, 0, 0, 160))
    draw.text((size // 2, size // 5), text, fill=(255, 255, 255, 255), font=font)
    return image
