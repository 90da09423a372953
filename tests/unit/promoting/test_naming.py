"""Two models never share a name that nobody chose, and a name that was chosen holds one model."""

from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.errors import UserError
from components.common.registry.model_registry import Registry

from .chains import make_chain, promote_chain


@pytest.fixture
def promote(uri: str, tmp_path: Path) -> Any:
    count = iter(range(9))

    def run(source: str, name: str = "", *, settings: Any = None, **model: Any) -> str:
        """Promote a model from a file, better than those before. Returns the closing line."""
        number = next(count)
        paths = make_chain(tmp_path / f"chain {number}", 70 + number, **model)
        output = tmp_path / f"promotion {number}"
        return promote_chain(uri, paths, output, name, source=source, **(settings or {}))

    return run


def test_the_name_is_the_file_s_or_the_architecture_s(promote: Any, registry: Registry) -> None:
    assert promote("/models/shuffle net (1).onnx", architecture="shuffle net (1)").startswith(
        "shuffle-net-1- version 1"
    )
    assert promote("s3://bucket/best.pth").startswith("best version 1")
    assert promote("/runs/7/checkpoint", architecture="timm/vit_tiny").startswith("timm-vit_tiny version 1")
    assert promote("").startswith("resnet18 version 1")
    assert promote("/models/best.onnx", "mine").startswith("mine version 1")
    assert registry.names() == ["best", "mine", "resnet18", "shuffle-net-1-", "timm-vit_tiny"]
    assert {registry.aliases(name)["champion"] for name in registry.names()} == {"1"}


@pytest.mark.parametrize(
    ("name", "source", "model", "said"),
    [
        ("mine", "/b/model.onnx", {"architecture": "vgg16"}, r"architecture: resnet18 there, vgg16 here\)"),
        ("mine", "/a/model.onnx", {"classes": ("a", "c")}, r"another class list\)"),
        ("", "/b/model.onnx", {"digest": "other"}, r"source file: /a/model\.onnx there, /b/model\.onnx here\)"),
    ],
)
def test_another_model_is_refused_before_anything_is_registered(
    promote: Any, registry: Registry, name: str, source: str, model: Any, said: str
) -> None:
    promote("/a/model.onnx", name)
    with pytest.raises(
        UserError, match=rf"{name or 'model'} version 1 is of another model .*{said}.*--registered-model"
    ):
        promote(source, name, **model)
    (version,) = registry.versions(name or "model")
    assert version.aliases == ("candidate", "champion")
    assert "champion" in promote(source, name, settings={"allow_other_model": True}, **model)
    assert "version 3" in promote(source, name, **model)  # it has a version of its own there now
    assert "version 4" in promote("/a/model.onnx", name)


@pytest.mark.parametrize(
    ("name", "source", "model"),
    [
        ("", "/a/model.onnx", {"digest": "trained again"}),
        ("", "/moved/model.onnx", {}),
        ("", "/a/model.onnx", {"split": "two"}),
        ("mine", "/b/model.onnx", {"digest": "other"}),
    ],
)
def test_the_same_model_is_a_new_version(promote: Any, name: str, source: str, model: Any) -> None:
    promote("/a/model.onnx", name)
    assert f"{name or 'model'} version 2 registered" in promote(source, name, **model)
