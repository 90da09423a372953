"""Videos and live streams, decoded by FFmpeg (PyAV): on the CPU, or by NVDEC.

Everything that FFmpeg opens may be hostile: of its protocols and formats only those stand open that hold one video,
since playlists and the like name other files and addresses.
"""

import ctypes
import math
import netrc
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import av
import numpy as np
from av.codec.hwaccel import HWAccel, hwdevices_available
from av.stream import Disposition
from av.video.reformatter import ColorRange, VideoReformatter

from components.common.contracts.errors import EngineryError, UserError, shortened, shown
from components.common.contracts.foreign import MAX_ASPECT_RATIO

if TYPE_CHECKING:
    from av.container import InputContainer

STDIN = "-"
VIDEO_EXTENSIONS = (
    ".3gp", ".avi", ".flv", ".h264", ".264", ".h265", ".hevc", ".ivf", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg",
    ".mpg", ".mts", ".obu", ".ogv", ".ts", ".webm", ".wmv",
)  # fmt: skip
_FORMATS = "asf,avi,av1,flv,h264,hevc,ivf,matroska,mjpeg,mov,mpeg,mpegts,mpegvideo,obu,ogg,rtsp,webm"
# By scheme the protocols that FFmpeg may use, and whether the source is live.
_LIVE = {
    "rtsp": "rtsp,rtp,udp,tcp",
    "rtsps": "rtsps,rtsp,rtp,udp,tcp,tls",
    "srt": "srt,udp",
    "tcp": "tcp",
    "udp": "udp",
}
_OPEN_TIMEOUT_S = 10.0
_MAX_FOUND = 10_000  # videos of one folder
_MAX_PIXELS = 8192 * 4352  # of a frame: 8K
_DECLARE_AN_END = ("matroska,webm", "mov,mp4,m4a,3gp,3g2,mj2")  # formats whose header holds the duration
_MISSING_S = 1.0  # before that end, from which on it is missed
_SET_BACK_S = 1.0  # a clock that goes back by more was set back
_ON_GPU = ("nv12", "p010le")  # what is converted there
_PIXELS_AT_ONCE = 1 << 25  # that become colours, some 30 bytes of memory each
# By FFmpeg's number of the colour space (BT.709, FCC, BT.601, SMPTE 240M, BT.2020), times 65536: what it adds of the
# red difference to red and of the blue one to blue, and what it takes of the blue and of the red one from green.
_COLOURS = {
    1: (117489, 138438, 13975, 34925),
    4: (104448, 132798, 24759, 53109),
    5: (104597, 132201, 25675, 53279),
    7: (117579, 136230, 16907, 35559),
    9: (110013, 140363, 12277, 42626),
}


@dataclass(frozen=True, kw_only=True)
class VideoSource:
    """A video before it was opened."""

    name: str  # for people, of one source alone: the path below the folder that was named, or the address
    address: str  # a path, an address, or -
    scheme: str = ""  # of a live address

    @property
    def is_live(self) -> bool:
        """True for a source that sends whether or not somebody reads it."""
        return bool(self.scheme)


@dataclass(frozen=True, kw_only=True)
class VideoFrame:
    """A decoded frame."""

    number: int  # in its video, from 0, frames that were dropped included
    time_s: float  # since the video's begin, by its own clock; of a raw stream by the frame rate
    pixels: Any  # [H, W, 3] uint8 RGB, upright: an array, on a GPU a tensor or Planes there
    received_s: float  # on time.monotonic's clock, once it was decoded

    def array(self) -> np.ndarray:
        """The pixels in the host's memory."""
        return self.pixels if isinstance(self.pixels, np.ndarray) else np.asarray(rgb_images([self.pixels])[0].cpu())


@dataclass(frozen=True, kw_only=True)
class Planes:
    """A frame as decoders leave it, in tensors: brightness, and for each four pixels two differences of colour."""

    luma: Any  # [H, W] uint8
    chroma: Any  # [H / 2, W / 2, 2] uint8
    space: int  # FFmpeg's number of the colour space
    is_full: bool  # whether all 256 levels are used
    turns: int  # by 90 degrees, until it is upright
    is_mirrored: bool  # whether it is to be flipped upside down before

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the RGB image, upright."""
        height, width = self.luma.shape
        return (width, height, 3) if self.turns % 2 else (height, width, 3)


def find_videos(sources: tuple[str, ...]) -> list[VideoSource]:
    """Return the videos that `sources` name, each once, files of a folder in the order of their names.

    Raises:
        UserError: there is no such file, a folder holds no video, or an address is of another kind.
    """
    found: list[VideoSource] = []
    for source in sources:
        scheme = source.partition("://")[0].lower() if "://" in source else ""
        path = Path(source).expanduser()
        if source == STDIN:
            found.append(VideoSource(name="standard input", address=STDIN))
        elif scheme:
            if scheme not in _LIVE:
                raise UserError(
                    f"{shown(source)} is of no kind that is read live; take one of {', '.join(_LIVE)}, or fetch the "
                    "file first",
                    code="unknown-video-address",
                    setting="sources",
                )
            found.append(VideoSource(name=shown(source), address=source, scheme=scheme))
        elif path.is_dir():
            files = sorted(
                file
                for file in path.rglob("*")
                if file.suffix.lower() in VIDEO_EXTENSIONS and file.is_file() and not file.name.startswith(".")
            )
            if not files or len(files) > _MAX_FOUND:
                many = f"{len(files):,} videos, more than {_MAX_FOUND:,}" if files else "no video"
                raise UserError(
                    f"the folder {path} holds {many}; videos are files that end in {', '.join(VIDEO_EXTENSIONS)}",
                    code="no-video",
                    setting="sources",
                )
            found += [
                VideoSource(name=shown(file.relative_to(path).as_posix()), address=str(file.absolute()))
                for file in files
            ]
        elif path.exists():  # a named pipe, too
            found.append(VideoSource(name=shown(path.name), address=str(path.absolute())))
        else:
            raise UserError(
                f"there is no video {source}; name a file, a folder, or an address such as rtsp://HOST/PATH",
                code="no-video",
                setting="sources",
            )
    found = list({video.address: video for video in found}.values())
    names = Counter(video.name for video in found)
    return [replace(video, name=shown(video.address)) if names[video.name] > 1 else video for video in found]


class OpenVideo:
    """A video that is being read. Not for several threads at once."""

    def __init__(
        self,
        source: VideoSource,
        *,
        decoder: str,
        read_timeout_s: float,
        on_gpu: bool = False,
        num_threads: int = 1,
    ) -> None:
        """Open it.

        Args:
            source: which one.
            decoder: "auto", "cpu" or "cuda".
            read_timeout_s: of a live source, the longest wait for data.
            on_gpu: whether pixels are on the GPU; what NVDEC decodes then never leaves it.
            num_threads: that decode where the CPU does; more than one pay only where others are idle.

        Raises:
            UserError: it is no video, or NVDEC was asked for and is not there.
            EngineryError: a live source does not answer.
        """
        self.source, self._on_gpu = source, on_gpu
        self.num_corrupt = 0  # packets that the decoder refused, or could not decode in whole
        self._container = _open(source, decoder, read_timeout_s, on_gpu)
        streams = [
            stream
            for stream in self._container.streams.video
            if stream.codec_context is not None and not stream.disposition & Disposition.attached_pic
        ]
        if not streams:
            self.close()
            raise UserError(
                f"{source.name} holds no video stream that can be decoded", code="no-video", setting="sources"
            )
        self._stream = streams[0]
        self._stream.codec_context.thread_count = 1 if self.decodes_on_gpu else num_threads
        self._stream.thread_type = "SLICE" if source.is_live else "AUTO"  # frames in parallel come late
        self._stream.codec_context.options = {"max_pixels": str(_MAX_PIXELS)}
        rate = self._stream.average_rate or self._stream.guessed_rate
        self._rate = float(rate) if rate else 25.0
        self._to_rgb = VideoReformatter()  # one for all frames: to make it takes longer than to convert a small frame

    @property
    def codec(self) -> str:
        """FFmpeg's name of the codec, such as h264."""
        return str(self._stream.codec_context.codec.canonical_name)

    @property
    def decodes_on_gpu(self) -> bool:
        """True where NVDEC decodes."""
        return bool(self._stream.codec_context.is_hwaccel)

    def decoded(self) -> "Iterator[av.VideoFrame]":
        """Decode until the end. Packets that are broken are counted; a frame is left out if nothing of it is whole.

        Raises:
            EngineryError: a live source broke off, or a file ended before its declared end.
        """
        packets, end_s = self._container.demux(), 0.0
        while True:
            try:
                packet = next(packets)
            except (StopIteration, av.error.EOFError):
                self._check_end(end_s)
                return
            except av.error.InvalidDataError:
                self.num_corrupt += 1
                continue
            except (av.error.FFmpegError, OSError) as error:
                raise _lost(self.source, error) from None
            if packet.pts is not None and packet.time_base is not None:
                end_s = max(end_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream.index != self._stream.index:
                continue
            try:
                decoded = self._stream.decode(packet)
            except av.error.FFmpegError:
                self.num_corrupt += 1
                continue
            self.num_corrupt += packet.is_corrupt or any(frame.is_corrupt for frame in decoded)
            for frame in decoded:
                sides = frame.width, frame.height
                if math.prod(sides) > _MAX_PIXELS or max(sides) > MAX_ASPECT_RATIO * min(sides):
                    self.num_corrupt += 1
                else:
                    yield frame

    def _check_end(self, end_s: float) -> None:
        """Raise EngineryError where the last packet, of sound too, ends long before the end that the file declares."""
        declared_s = (self._container.duration or 0) / 1e6 if self._container.format.name in _DECLARE_AN_END else 0.0
        if 0 < end_s < declared_s - _MISSING_S:
            raise EngineryError(
                f"{self.source.name} breaks off after {end_s:,.1f} of {declared_s:,.1f} s: it is cut or broken there; "
                "take a whole file",
                code="stream-lost",
            )

    def frames(self) -> Iterator[VideoFrame]:
        """As `decoded`, with numbers, times that never go back, and pixels in RGB."""
        begin_s, last_s = None, 0.0
        for number, frame in enumerate(self.decoded()):
            time_s = last_s + 1 / self._rate if number else 0.0
            if frame.time is not None:  # a camera's first frame after a pause may have none
                if begin_s is None or frame.time - begin_s < last_s - _SET_BACK_S:
                    begin_s = frame.time - time_s
                time_s = frame.time - begin_s
            last_s = max(last_s, time_s)
            pixels = self._upright(frame)
            yield VideoFrame(number=number, time_s=last_s, pixels=pixels, received_s=time.monotonic())

    def _upright(self, frame: av.VideoFrame) -> Any:
        """See VideoFrame.pixels."""
        turns, is_mirrored = _orientation(frame)
        is_even = frame.width % 2 == frame.height % 2 == 0
        if self._on_gpu and is_even and frame.sw_format is not None and frame.sw_format.name in _ON_GPU:
            return planes_of(frame, turns, is_mirrored=is_mirrored)
        rgb = self._to_rgb.reformat(frame, format="rgb24", threads=1).to_ndarray()
        # A copy where PyAV pads rows, which DALI does not take.
        pixels = np.ascontiguousarray(np.rot90(rgb[::-1] if is_mirrored else rgb, turns))
        if not self._on_gpu:
            return pixels
        import torch

        return torch.from_numpy(pixels).cuda()

    def close(self) -> None:
        """Let go of file, connection and decoder."""
        self._container.close()


def has_nvdec() -> bool:
    """True if NVIDIA's decoder can be loaded here: a GPU, and the driver's libnvcuvid."""
    if "cuda" not in hwdevices_available():
        return False
    for name in ("libcuda.so.1", "libnvcuvid.so.1"):
        try:
            ctypes.CDLL(name)
        except OSError:
            return False
    return True


def _open(source: VideoSource, decoder: str, read_timeout_s: float, on_gpu: bool) -> "InputContainer":
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": _LIVE.get(source.scheme, "file,fd")}
    if source.scheme in ("rtsp", "rtsps"):
        options |= {"rtsp_transport": "tcp", "fflags": "nobuffer"}
    timeout = (_OPEN_TIMEOUT_S, read_timeout_s) if source.is_live else None
    how: dict[str, Any] = {}
    if decoder == "cuda" and not has_nvdec():
        raise UserError(
            "decoder cuda was asked for, and NVIDIA's decoder can't be loaded here: it needs a GPU and the driver's "
            "libnvcuvid (in a container: NVIDIA_DRIVER_CAPABILITIES with video). Take decoder auto or cpu",
            code="no-nvdec",
            setting="decoder",
        )
    if decoder == "cuda" or (decoder == "auto" and has_nvdec()):
        if on_gpu:
            import torch

            torch.cuda.synchronize()  # makes PyTorch's context that of this thread, for FFmpeg to take
            how["options"] = {"primary_ctx": "0", "current_ctx": "1"}
        how = {"hwaccel": HWAccel("cuda", allow_software_fallback=decoder == "auto", is_hw_owned=on_gpu, **how)}
    address = "fd:" if source.address == STDIN else _with_login(source)
    try:
        return av.open(address, "r", options=options, timeout=timeout, **how)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        if source.is_live:
            raise _lost(source, error) from None
        raise UserError(
            f"{source.name} is no video that can be read: {shortened(_reason(error))}; take a whole file in a usual "
            "container (MP4, Matroska, WebM, AVI, MPEG-TS) with H.264, HEVC, VP9 or AV1",
            code="unreadable-video",
            setting="sources",
        ) from None


def _with_login(source: VideoSource) -> str:
    """The address with user and password from ~/.netrc, where that names its host."""
    if not source.is_live:
        return source.address
    parts = urlsplit(source.address)
    file = os.environ.get("NETRC") or str(Path("~/.netrc").expanduser())
    try:
        login = netrc.netrc(file).authenticators(parts.hostname or "")
    except (OSError, netrc.NetrcParseError):
        login = None
    if login is None:
        return source.address
    user, password = quote(login[0], safe=""), quote(login[2] or "", safe="")
    return parts._replace(netloc=f"{user}:{password}@{parts.netloc}").geturl()


def _lost(source: VideoSource, error: Exception) -> EngineryError:
    what = "does not answer" if source.is_live else "breaks off"
    return EngineryError(f"{source.name} {what}: {shortened(_reason(error))}", code="stream-lost")


def _reason(error: Exception) -> str:
    """FFmpeg's reason, without the address, which may hold a password."""
    if isinstance(error, av.error.ExitError):  # the timeout
        return "no data came in time"
    return str(getattr(error, "strerror", None) or type(error).__name__)


def _orientation(frame: av.VideoFrame) -> tuple[int, bool]:
    """Turns by 90 degrees until a frame is upright, and whether it is to be flipped upside down before."""
    matrix: Any = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return 0, False
    a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5].astype(float)
    return round(frame.rotation / 90) % 4, a * d < b * c


def planes_of(frame: av.VideoFrame, turns: int = 0, *, is_mirrored: bool = False) -> Planes:
    """The planes of NV12, or its form with 10 bits, of even sides, where they are; they keep the frame's memory.

    FFmpeg copies what NVDEC decodes into memory of its own, on the stream on which PyTorch works, too. The planes
    become colours later, many at once: each operation of a reader holds up the others.
    """
    import torch
    from torch.utils.dlpack import from_dlpack

    luma, chroma = (from_dlpack(plane.__dlpack__()) for plane in frame.planes)
    if luma.dtype != torch.uint8:  # the upper byte holds the upper 8 of 10 bits
        luma, chroma = luma.view(torch.uint8)[:, 1::2], chroma.contiguous().view(torch.uint8)[..., 1::2]
    is_full = frame.color_range == ColorRange.JPEG
    space = int(frame.colorspace)
    return Planes(luma=luma, chroma=chroma, space=space, is_full=is_full, turns=turns, is_mirrored=is_mirrored)


def empty_planes() -> Planes:
    """Planes of zeros on the GPU, of 1280 x 720 pixels."""
    import torch

    luma, chroma = (torch.zeros(shape, dtype=torch.uint8, device="cuda") for shape in ((720, 1280), (360, 640, 2)))
    return Planes(luma=luma, chroma=chroma, space=5, is_full=False, turns=0, is_mirrored=False)


def rgb_images(frames: Sequence[Any]) -> list[Any]:
    """Images [H, W, 3] uint8 RGB, upright: those of Planes where they are, others as they came.

    Each colour stands for its four pixels, and all is computed in the integers of FFmpeg's conversion from yuv420p on
    x86, to the bit.
    """
    found, alike = list(frames), defaultdict[Any, list[int]](list)
    for place, frame in enumerate(frames):
        if isinstance(frame, Planes):
            alike[(frame.luma.shape, frame.space, frame.is_full)].append(place)
    for (shape, space, is_full), places in alike.items():
        step = max(1, _PIXELS_AT_ONCE // shape.numel())
        for start in range(0, len(places), step):
            some = places[start : start + step]
            images = _rgb_of_planes([frames[place] for place in some], space, is_full)
            for place, image in zip(some, images, strict=True):
                plain = image.flip(0) if frames[place].is_mirrored else image
                turns = frames[place].turns
                found[place] = plain.rot90(turns).contiguous() if turns else plain
    return found


def _rgb_of_planes(frames: Sequence[Planes], space: int, is_full: bool) -> Any:
    """[B, H, W, 3] of frames of one size."""
    import torch

    luma, chroma = (torch.stack([getattr(frame, name) for frame in frames]) for name in ("luma", "chroma"))
    grey_scale, scales = _scales(space, is_full, chroma.device)
    grey = ((8 * (luma.int() - (0 if is_full else 16)) * grey_scale) >> 16).short()
    # [B, H / 2, W / 2, 2, 3]: what each difference adds to red, green and blue
    parts = (8 * (chroma.int() - 128)[..., None] * scales) >> 16
    added = (parts[..., 0, :] + parts[..., 1, :]).short()
    num_frames, height, width = grey.shape
    pixels = grey.view(num_frames, height // 2, 2, width // 2, 2, 1) + added[:, :, None, :, None]
    return pixels.clamp_(0, 255).to(torch.uint8).view(num_frames, height, width, 3)


@cache
def _scales(space: int, is_full: bool, device: Any) -> tuple[int, Any]:
    """Factors of grey, and of the blue and the red difference for red, green and blue ([2, 3]), times 8192."""
    import torch

    red, blue, green_by_blue, green_by_red = _COLOURS.get(space, _COLOURS[5])
    scales = torch.tensor([[0, -green_by_blue, blue], [red, -green_by_red, 0]], dtype=torch.int32, device=device)
    if is_full:
        return 8192, (torch.div(scales * 224, 255, rounding_mode="trunc") + 4) >> 3
    return 9539, (scales + 4) >> 3  # 9539 / 8192: 255 / 219
