"""Label the frames of videos and live streams with one precision of a bundle.

Reads:   a Bundle; videos: files, folders, or live sources that FFmpeg knows, such as rtsp://.
Writes:  an Analysis: frames.jsonl (a line per frame), events.jsonl, index.html (timeline and thumbnails by stream),
         summary.json, on demand an annotated video per stream, manifest.json.
Needs:   a GPU with TensorRT for engines; without one, OpenVINO runs FP32 and INT8 on the CPU.

Ctrl-C ends it with whole files: what was seen until then is the result.
"""
