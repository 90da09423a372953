"""Frames that NVDEC decodes stay on the GPU, with the colours of FFmpeg's. Fails without a GPU and its decoder."""

from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from components.analyze.videos import OpenVideo, Planes, find_videos, rgb_images
from components.common.contracts.transforms import TransformSpec
from components.common.data.dali_pipelines import FrameBatches


@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuv420p10le"])
def test_frames_on_the_gpu_are_those_of_the_cpu(pixel_format: str, tmp_path: Path) -> None:
    codec = "libx264" if pixel_format == "yuv420p" else "libx265"
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (5, 9, 16, 3), np.uint8)
    pictures = [np.asarray(Image.fromarray(each).resize((320, 180), Image.Resampling.BICUBIC)) for each in coarse]
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        stream = container.add_stream(codec, rate=5)
        stream.width, stream.height, stream.pix_fmt = 320, 180, pixel_format
        for pixels in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    found = {}
    for decoder, on_gpu in (("cpu", False), ("cuda", True)):
        video = OpenVideo(*find_videos((str(tmp_path),)), decoder=decoder, read_timeout_s=5.0, on_gpu=on_gpu)
        assert video.decodes_on_gpu == on_gpu
        found[decoder] = list(video.frames())
        video.close()
    assert len(found["cpu"]) == len(found["cuda"]) == 5
    assert all(isinstance(frame.pixels, Planes) and frame.pixels.luma.is_cuda for frame in found["cuda"])
    for one, other in zip(found["cpu"], found["cuda"], strict=True):
        # FFmpeg smooths the colours of 10 bits over the pixels, and leaves those of 8 as they are.
        assert np.abs(one.array().astype(int) - other.array()).mean() <= (0 if pixel_format == "yuv420p" else 4)
    spec = TransformSpec(crop_size=96, resize_size=112)
    images = [frame.pixels for frame in found["cpu"]], rgb_images([frame.pixels for frame in found["cuda"]])
    for some in images:
        some[1] = some[1][20:]  # of another size
    expected = FrameBatches(spec, 5).transform(images[0])
    actual = FrameBatches(spec, 5, 0).transform(images[1])
    assert np.abs(actual.cpu().numpy() - expected).mean() < 0.06
