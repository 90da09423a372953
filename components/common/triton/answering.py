"""How models of Triton's Python backend refuse a request."""

from typing import Any

import triton_python_backend_utils as pb


def refusal(reason: str) -> Any:
    """The response to a request that is at fault: HTTP 400, INVALID_ARGUMENT of gRPC. Nothing is logged of it."""
    return pb.InferenceResponse([], pb.TritonError(reason, pb.TritonError.INVALID_ARG))
