"""ONNX files as foreign bytes: a file may name others to read its weights from, which none of ours does."""

from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from onnx import TensorProto
from onnx.checker import MAXIMUM_PROTOBUF

from components.common.contracts.errors import UserError


def read_onnx(path: Path) -> onnx.ModelProto:
    """Read a file that holds all of its weights.

    Raises:
        UserError: see `onnx_content` and `parse_onnx`.
    """
    return parse_onnx(onnx_content(path), path)


def onnx_content(path: Path) -> bytes:
    """Read the content of a file.

    Raises:
        UserError: it can't be read, is empty, or larger than a protobuf message may be.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAXIMUM_PROTOBUF + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. Give the path of an ONNX model.", code="onnx-missing") from None
    except OSError as error:
        text = f"{path}: can't be read ({error.strerror}). Give the path of an ONNX model."
        raise UserError(text, code="onnx-missing") from None
    if not content:
        raise UserError(f"{path}: not an ONNX file, it is empty. Export it again.", code="not-onnx")
    if len(content) > MAXIMUM_PROTOBUF:
        raise UserError(f"{path}: not an ONNX file, which has at most {MAXIMUM_PROTOBUF:,} bytes.", code="not-onnx")
    return content


def parse_onnx(content: bytes, path: Path) -> onnx.ModelProto:
    """A file's content, without a look at any other file.

    Args:
        content: what is in it.
        path: of the file, for messages.

    Raises:
        UserError: it is no ONNX, or a tensor anywhere in it (initializers, attributes, sparse tensors, subgraphs,
            functions) names another file: libraries read that from where they please.
    """
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(content)
        others = [t for t in _tensors(proto) if t.data_location == TensorProto.EXTERNAL or t.external_data]
    except (DecodeError, UnicodeError) as error:
        raise UserError(f"{path}: not an ONNX file ({error}).", code="not-onnx") from error
    if others:
        raise UserError(
            f"{path}: keeps its weights in external data files. Write one file: "
            f"onnx.save(onnx.load('{path.name}'), 'single.onnx', save_as_external_data=False).",
            code="external-data",
        )
    return proto


def _tensors(message: Message) -> Iterator[TensorProto]:
    """Every tensor in a message.

    Raises:
        UnicodeError: a name is no UTF-8, which protobuf gives as bytes.
    """
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            if any(isinstance(name, bytes) for name in ([value] if isinstance(value, str | bytes) else value)):
                raise UnicodeError(f"its {field.full_name} is no UTF-8")
        elif field.type == field.TYPE_MESSAGE:
            for entry in [value] if isinstance(value, Message) else value:
                if not isinstance(entry, TensorProto):
                    yield from _tensors(entry)
                    continue
                if isinstance(entry.name, bytes):  # all of its fields would be a copy of its numbers
                    raise UnicodeError("the name of a tensor is no UTF-8")
                yield entry
