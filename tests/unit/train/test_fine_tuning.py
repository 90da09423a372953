"""Pretrained weights from files and checkpoints, a new head, and a backbone that stays as it is."""

import hashlib
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torchvision
from huggingface_hub import constants as hub
from safetensors.torch import load_file, save_file

from components.common.contracts.errors import Preempted
from components.common.contracts.transforms import IMAGENET_MEAN
from components.common.data import places
from components.common.runtimes.architectures import build_model
from components.train.batches import check_sizes, plan_batches
from components.train.checkpointing import WEIGHTS
from components.train.fine_tuning import head_names, pretrained_normalization, starting_model
from tests.serving import QuietHandler, address_of
from tests.unit.refusals import refuses

from .conftest import Log, Train, config


def start(num_classes: int, **changed: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the weights that training begins with, and the notes on them."""
    log = Log()
    return starting_model(config(**changed), num_classes, log).state_dict(), log.said


@pytest.mark.parametrize(
    ("architecture", "head"), [("resnet18", "fc"), ("squeezenet1_1", "classifier.1"), ("timm/resnet10t", "fc")]
)
def test_the_head_is_what_follows_the_number_of_classes(architecture: str, head: str) -> None:
    assert head_names(architecture) == {f"{head}.weight", f"{head}.bias"}


WRITERS: dict[str, Callable[[dict[str, torch.Tensor], Path], object]] = {
    "safetensors": save_file,
    "parallel": lambda given, path: torch.save({"state_dict": {f"module.{k}": v for k, v in given.items()}}, path),
    "torchvision's script": lambda given, path: torch.save({"model": given, "optimizer": {"state": {}}}, path),
    **{
        prefix: lambda given, path, prefix=prefix: torch.save(
            {"model": {prefix + name: value for name, value in given.items()}, "epoch": 4}, path
        )
        for prefix in ("module._orig_mod.", "_orig_mod.module.", "model._orig_mod.")  # of a wrapped network
    },
}


@pytest.mark.parametrize("writer", WRITERS)
def test_weights_from_a_file(tmp_path: Path, writer: str) -> None:
    torch.manual_seed(1)
    given = build_model("resnet18", 7).state_dict()
    path = tmp_path / ("w.safetensors" if writer == "safetensors" else "w.pth")
    WRITERS[writer](given, path)
    same, said = start(7, pretrained=str(path))
    assert said == []
    assert all(torch.equal(value, given[key]) for key, value in same.items())
    other, said = start(10, pretrained=str(path))
    assert said == ["the pretrained weights are for other classes: fc.bias, fc.weight start fresh"]
    assert torch.equal(other["layer4.1.conv2.weight"], given["layer4.1.conv2.weight"])
    assert other["fc.weight"].shape == (10, 512)


def test_weights_without_the_version_that_their_network_asks_for(tmp_path: Path) -> None:
    given = build_model("mnasnet0_5", 7).state_dict()
    save_file(given, tmp_path / "w.safetensors")
    same, _ = start(7, architecture="mnasnet0_5", pretrained=str(tmp_path / "w.safetensors"))
    assert all(torch.equal(value, given[key]) for key, value in same.items())


def test_a_detector_begins_with_torchvisions_weights(tmp_path: Path) -> None:
    from torchvision.models.detection import fcos_resnet50_fpn

    given = fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91).state_dict()
    torch.save(given, tmp_path / "fcos.pth")
    weights, said = start(5, architecture="detection/fcos_resnet50_fpn", pretrained=str(tmp_path / "fcos.pth"))
    assert len(said) == 1  # on the head
    assert "cls_logits" in said[0]
    assert "backbone" not in said[0]
    assert torch.equal(weights["head.regression_head.bbox_reg.weight"], given["head.regression_head.bbox_reg.weight"])
    assert weights["head.classification_head.cls_logits.weight"].shape[0] == 5


def test_a_frozen_backbone_keeps_weights_and_statistics(train: Train, tmp_path: Path) -> None:
    small = {"architecture": "timm/resnet10t", "epochs": 1, "global_batch_size": 48}
    first = train(output="first", **small)
    frozen = {**small, "pretrained": str(first.path), "freeze_backbone": True, "ema_decay": 0.5}
    second = train(output="second", **frozen)
    before, after = load_file(first.file(WEIGHTS)), load_file(second.file(WEIGHTS))
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"fc.weight", "fc.bias"}
    with refuses("weights-of-another-architecture", "train.pretrained"):
        start(10, pretrained=str(first.path))


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"freeze_backbone": True}, "no-pretrained-weights"),
        ({"pretrained": "some/folder"}, "no-weights"),
        ({"pretrained": "IMAGENET_22K"}, "no-weights"),
        ({"pretrained": "default", "architecture": "detection/fcos_small"}, "no-weights"),
        ({"pretrained": "default", "architecture": "detection/fcos_fpn/timm/resnet10t"}, "no-weights"),
    ],
)
def test_what_can_not_be_begun_with(changed: dict[str, Any], code: str) -> None:
    with refuses(code, "train.pretrained"):
        start(10, **changed)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("text.pth", "not-weights"),
        ("model.pth", "weights-hold-code"),
        ("x.safetensors", "weights-do-not-fit"),
        ("numbered.pth", "not-weights"),
        ("int8.pth", "weights-not-float"),
        ("missing.pth", "weights-missing"),
        # Of few bytes that claim any size.
        ("packed.pth", "weights-packed"),
        ("wide.pth", "weights-do-not-fit"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, name: str, code: str) -> None:
    (tmp_path / "text.pth").write_text("hello")
    torch.save(build_model("resnet18", 2), tmp_path / "model.pth")
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    torch.save({0: torch.zeros(1)}, tmp_path / "numbered.pth")
    whole = {name: value.to(torch.int8) for name, value in build_model("resnet18", 10).state_dict().items()}
    torch.save(whole, tmp_path / "int8.pth")
    torch.save({"fc.bias": torch.zeros(1).expand(1 << 50)}, tmp_path / "wide.pth")
    with (
        zipfile.ZipFile(tmp_path / "model.pth") as plain,
        zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.namelist():
            packed.writestr(entry, plain.read(entry))
    with refuses(code) as caught:
        start(10, pretrained=str(tmp_path / name))
    if name == "x.safetensors":  # of 61 weights that are missing
        assert '" ...; Unexpected key(s) in state_dict: "x"; name the architecture' in str(caught.value)


class Files(QuietHandler, SimpleHTTPRequestHandler):
    """Gives the files of a folder away; those of resolve/main as Hugging Face's hub does."""

    etag = ""  # the SHA-256 that it says a file has; empty for the true one
    leads_to = ""  # another server
    num_sent = 1 << 30  # bytes of a file, at most; then the connection ends

    def send_head(self) -> Any:
        self.path = self.path.replace("/resolve/main/", "/")
        if not self.leads_to:
            return super().send_head()
        self.send_response(302)
        self.send_header("Location", f"{self.leads_to}{self.path}")
        return self.end_headers()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        outputfile.write(source.read(self.num_sent))

    def end_headers(self) -> None:
        if (file := Path(self.translate_path(self.path))).is_file():
            self.send_header("X-Repo-Commit", "c" * 40)
            self.send_header("ETag", f'"{self.etag or hashlib.sha256(file.read_bytes()).hexdigest()}"')
        super().end_headers()


def served(folder: Path, **changed: Any) -> AbstractContextManager[str]:
    """The address of a server of these files."""
    return address_of(partial(type("Handler", (Files,), changed), directory=str(folder)))


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with weights of a small network in both kinds of file. Nobody waits before the next attempt."""
    monkeypatch.setattr(places, "_ATTEMPTS_S", (0.0, 0.0))
    weights = build_model("squeezenet1_1", 10).state_dict()
    (tmp_path / "files").mkdir()
    save_file(weights, tmp_path / "files" / "w.safetensors")
    torch.save(weights, tmp_path / "files" / "w.pth")
    return tmp_path / "files"


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
def test_weights_behind_a_uri(published: Path, name: str) -> None:
    digest = hashlib.sha256((published / name).read_bytes()).hexdigest()
    expected, small = load_file(published / "w.safetensors"), {"architecture": "squeezenet1_1"}
    fsspec.filesystem("memory").pipe_file(f"/bucket/{name}", (published / name).read_bytes())
    with served(published) as address:
        for uri in (f"{address}/{name}", f"memory://bucket/{name}", (published / name).as_uri()):
            for known in ("", digest[:8], digest):
                found, said = start(10, pretrained=uri, pretrained_sha256=known, **small)
                assert said == []
                assert all(torch.equal(value, expected[key]) for key, value in found.items())
            with refuses("weights-of-another-digest", "train.pretrained"):
                start(10, pretrained=uri, pretrained_sha256=f"{int(digest[:8], 16) ^ 1:08x}", **small)
    with refuses("unreadable-uri"):
        start(10, pretrained=f"{address}/{name}", **small)


def test_hostile_servers(published: Path) -> None:
    """Nothing of what they give is run or written anywhere, and nothing inside this network is read for them."""
    torch.save(build_model("squeezenet1_1", 2), published / "model.pth")
    (published / "short.pth").write_bytes((published / "w.pth").read_bytes()[:-100])
    before = set(published.parent.rglob("*"))
    with (
        served(published) as address,
        served(published, leads_to=address) as other,
        served(published, num_sent=9) as cut,
    ):
        for uri, code in {
            f"{address}/model.pth": "weights-hold-code",
            f"{address}/short.pth": "not-weights",
            f"{address}/no.pth": "no-data",
            f"{address}/w.onnx": "no-weights",
            f"{other}/w.pth": "inner-address",
            f"{cut}/w.pth": "unreadable-uri",
            f"simplecache::{address}/w.pth": "chained-uri",
        }.items():
            with refuses(code) as caught:
                start(10, pretrained=uri, architecture="squeezenet1_1")
            assert "enginery-weights" not in str(caught.value)  # a folder that is gone again
        assert start(10, pretrained=f"{address}/..%2F..%2Fw.pth", architecture="squeezenet1_1")
    assert set(published.parent.rglob("*")) == before


def test_torchvision_s_weights_come_from_its_server_or_torch_s_folder(published: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    entry = torchvision.models.SqueezeNet1_1_Weights.DEFAULT
    name, small = entry.url.rpartition("/")[2], {"architecture": "squeezenet1_1", "pretrained": "default"}
    folder = tmp_path / "torch" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / name).write_bytes((published / "w.pth").read_bytes())
    with refuses("weights-of-another-digest", "train.pretrained"):  # the name of the file holds that of others
        start(10, **small)
    digest = hashlib.sha256((published / "w.pth").read_bytes()).hexdigest()[:8]
    (published / "w.pth").rename(published / f"w-{digest}.pth")
    expected = load_file(published / "w.safetensors")
    with served(published) as address:
        monkeypatch.setattr(entry.value, "url", f"{address}/w-{digest}.pth")
        first, _ = start(10, **small)
    again, _ = start(10, **small)  # nobody serves them any more
    for found in (first, again):
        assert all(torch.equal(value, expected[key]) for key, value in found.items())
    torch.save(build_model("squeezenet1_1", 2), published / "w-01234567.pth")
    with served(published) as address:
        monkeypatch.setattr(entry.value, "url", f"{address}/w-01234567.pth")
        with refuses("weights-of-another-digest", "train.pretrained"):
            start(10, **small)
    with refuses("weights-out-of-reach", "train.pretrained"):
        start(10, **small)
    assert sorted(path.name for path in folder.iterdir()) == sorted([name, f"w-{digest}.pth"])


def test_timm_s_weights_come_from_a_mirror_or_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE become these constants when the hub's library is imported."""
    weights = build_model("timm/resnet10t", 1000).state_dict()
    folder = tmp_path / "files" / "timm" / "resnet10t.c3_in1k"
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors")

    def begin(cache: str, endpoint: str = "", **settings: str) -> torch.Tensor:
        monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / cache))
        monkeypatch.setattr(hub, "HF_HUB_OFFLINE", not endpoint)
        monkeypatch.setattr(
            hub, "HUGGINGFACE_CO_URL_TEMPLATE", f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        return start(1000, **{"architecture": "timm/resnet10t", "pretrained": "default", **settings})[0]["fc.weight"]

    with served(tmp_path / "files") as address:
        assert torch.equal(begin("first", address), weights["fc.weight"])
    assert torch.equal(begin("first", pretrained="c3_in1k"), weights["fc.weight"])
    for cache, code, settings in (
        ("first", "weights-of-another-digest", {"pretrained_sha256": "0" * 64}),
        ("first", "no-weights", {"pretrained": "no_such"}),
        ("second", "weights-out-of-reach", {}),
    ):
        with refuses(code, "train.pretrained"):
            begin(cache, **settings)
    (damaged,) = (tmp_path / "first").rglob("blobs/*")
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with refuses("weights-of-another-digest", "train.pretrained"):
        begin("first")
    with served(tmp_path / "files", etag="0" * 64) as address, refuses("weights-of-another-digest"):
        begin("third", address)
    save_file({"other": weights["fc.weight"]}, folder / "model.safetensors")
    with served(tmp_path / "files") as address, refuses("weights-do-not-fit", "train.pretrained"):
        begin("fourth", address)


@pytest.mark.parametrize(
    ("architecture", "pretrained", "mean", "std"),
    [
        ("timm/vit_small_patch16_224", "default", 0.5, 0.5),
        ("timm/vit_small_patch16_224", "dino", 0.485, 0.229),
        ("timm/vit_small_patch16_224", "", 0.485, 0.229),
        ("timm/vit_small_patch16_224", "weights.pt", 0.485, 0.229),
        ("timm/vit_small_patch16_224", "https://host.example/weights.pt", 0.485, 0.229),
        ("timm/vit_small_patch16_224", "gone.PT", 0.485, 0.229),
        ("inception_v3", "default", 0.5, 0.5),
        ("efficientnet_v2_l", "default", 0.5, 0.5),
        ("detection/ssdlite320_mobilenet_v3_large", "default", 0.5, 0.5),
        ("detection/fcos_resnet50_fpn", "default", 0.485, 0.229),
        ("resnet50", "IMAGENET1K_V2", 0.485, 0.229),
    ],
)
def test_images_are_normalized_as_published_weights_expect(
    architecture: str, pretrained: str, mean: float, std: float
) -> None:
    found = pretrained_normalization(config(architecture=architecture, pretrained=pretrained))
    assert (found[0][0], found[1][0]) == (mean, std)


def test_images_are_normalized_as_a_checkpoint_s_were(train: Train, tmp_path: Path) -> None:
    first = train(output="first", epochs=1, normalization="dataset")
    start = {"epochs": 2, "pretrained": str(first.path)}
    with pytest.raises(Preempted):
        train(Log(sigterm_after=6), **start)  # between two epochs
    first.path.rename(tmp_path / "moved")
    second = train(**start)
    assert second.manifest.image_transform == first.manifest.image_transform
    assert second.manifest.image_transform.mean != IMAGENET_MEAN


ALEXNET, RESNET = {"architecture": "alexnet"}, {"architecture": "resnet18"}


@pytest.mark.parametrize(
    ("changed", "code", "setting", "reason"),
    [
        ({"image_sizes": [16, 32]}, "image-size-refused", "train.image_sizes", "16 px"),
        ({**ALEXNET, "image_size": 128, "image_sizes": [224]}, "size-not-exportable", "image_size", "such as 224"),
        ({"architecture": "vit_b_16"}, "image-size-refused", "train.image_size", "32 px"),
        (
            {"architecture": "segmentation/fpn_small", "image_size": 95},
            "image-size-refused",
            "train.image_size",
            "of 32",
        ),
        ({**RESNET, "per_gpu_batch_size": 1}, "batch-too-small", "train.per_gpu_batch_size", "32 px"),
    ],
)
def test_sizes_that_a_model_can_not_take(changed: dict[str, Any], code: str, setting: str, reason: str) -> None:
    wanted = config(**{"architecture": "squeezenet1_1", **changed})
    plan = plan_batches(wanted, 1, num_train_images=100, num_val_images=10)
    with refuses(code, setting, says=reason):
        check_sizes(build_model(wanted.architecture, 10), wanted, plan)


@pytest.mark.parametrize("architecture", ["resnet18", "alexnet"])
def test_checking_sizes_changes_nothing(architecture: str) -> None:
    wanted = config(architecture=architecture, image_size=224)
    model = build_model(architecture, 10)
    weights, before = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    check_sizes(model, wanted, plan_batches(wanted, 1, num_train_images=100, num_val_images=10))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
