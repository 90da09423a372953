"""The settings of a cluster, as `enginery submit --settings` takes them."""

import json
from pathlib import Path

import pytest

from enginery.cluster.settings import ClusterSettings, load_settings, settings_rows
from tests.pipelines.running import CLUSTER_YAML, compiled
from tests.unit.registered import enginery, refuses


def written(folder: Path, text: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(text)
    return file


VOLUME = "every_step: {volumes: [{claim: c, mount_path: /m, sub_path: %s}]}"
OTHER_VOLUME = "train_job: {volume: {claim: b, mount_path: /s}}"


@pytest.mark.parametrize(
    ("text", "setting", "words"),
    [
        ("trian: {}", "trian", "did you mean train?"),
        ("train: {gpu: {number: 1}}", "train.gpu.number", "valid keys: count, resource, product"),
        ("validate: {gpu: {count: -1}}", "validate.gpu.count", "got -1, must be greater than or equal to 0"),
        ("every_step: {secrets: [{env: {A: b}}]}", "every_step.secrets[0].name", "is required"),
        ("train: {num_nodes: 2}", "", "train.num_nodes above 1 needs train_job.volume"),
        ("train: {memory: 8Gi}", "", "train: its memory 8Gi must be more than its shm 8Gi"),
        ("promote: {caching: true}", "", "promote.caching"),
        ("images: {digests: {train: latest}}", "images.digests.train", "must match pattern"),
        ("train: {memory: 64}", "train.memory", "write its unit, such as 64Gi"),
        ("gate: {volumes: [{claim: a, mount_path: /m}, {claim: b, mount_path: /m/}]}", "", "2 volumes have the mount"),
        ("train: {volumes: [{claim: a, mount_path: /dev/shm}]}", "", "train: 2 volumes have the mount_path /dev/shm"),
        (f"{{train: {{num_nodes: 2, volumes: [{{claim: a, mount_path: /s}}]}}, {OTHER_VOLUME}}}", "", "mount_path /s"),
        ("{every_step: {env: {KEY: a}}, export: {secrets: [{name: s, env: {KEY: k}}]}}", "", "KEY is set 2 times"),
        ("export: {gpu: {product: A}, node_selector: {nvidia.com/gpu.product: B}}", "", "export: gpu.product is A"),
        ("every_step: {env: {HF_TOKEN: hf_1}}", "every_step.env", "HF_TOKEN holds a secret in the clear"),
        ("every_step: {env: {MLFLOW_TRACKING_URI: 'http://a:b@mlflow:5000'}}", "every_step.env", "holds a secret"),
        ("namespace: Team Vision", "namespace", "must match pattern"),
        ("service_account: a/b", "service_account", "must match pattern"),
        (VOLUME % "/a", "every_step.volumes[0].sub_path", "must match"),
        (VOLUME % "../a", "every_step.volumes[0].sub_path", "must match"),
        (VOLUME % "a/../b", "every_step.volumes[0].sub_path", "must match"),
        ("dataset_volume: {claim: a.b, mount_path: /m}", "dataset_volume.claim", "must match pattern"),
        ("train: {gpu: {product: NVIDIA H200}}", "train.gpu.product", "must match pattern"),
        ("every_step: {node_selector: {zone: a b}}", "every_step.node_selector.zone", "must match pattern"),
        ("every_step: {secrets: [{name: s, env: {A: a b}}]}", "every_step.secrets[0].env.A", "must match"),
        ("train: {retries: {factor: 1.5}}", "train.retries.factor", "a valid integer"),  # Argo refuses it
        ("images: {registry: 'https://registry.example.com/team'}", "images.registry", "must match pattern"),
        ("every_step: {timeout_s: 99999999999999999999}", "every_step.timeout_s", "less than or equal to"),
        ("train: {num_nodes: 2000}", "train.num_nodes", "less than or equal to 1024"),
    ],
)
def test_settings_that_can_not_be(tmp_path: Path, text: str, setting: str, words: str) -> None:
    with refuses("bad-cluster-settings", setting) as caught:
        load_settings(written(tmp_path, text))
    assert str(caught.value).startswith(f"{tmp_path / 'cluster.yaml'}: ")
    assert words in str(caught.value)


def test_what_a_step_gets_falls_to_every_step(tmp_path: Path) -> None:
    settings = load_settings(Path(CLUSTER_YAML))
    train, promote = settings.of("train"), settings.of("promote")
    assert (train.retries.times, promote.retries.times) == (2, 0)
    assert (train.timeout_s, promote.timeout_s) == (259200, 86400)
    assert set(train.env) == set(promote.env) == {"MLFLOW_TRACKING_URI", "ENGINERY_DATASETS"}
    assert "ENGINERY_DATASETS" not in settings.of("gate").env
    assert [volume.claim for volume in settings.of("preprocess").volumes] == ["images", "shared"]
    assert [settings.of(step).shm for step in ("preprocess", "train", "export")] == ["", "64Gi", "8Gi"]
    assert settings.image("gate") == "registry.example.com/vision/promote:0.2.0"
    assert settings.image("train").startswith("registry.example.com/vision/train@sha256:1111")
    # A verdict is not tried again unless asked.
    for of_gate, times in (("", [3, 0, 3]), (", gate: {retries: {times: 1}}", [3, 1, 3])):
        settings = load_settings(written(tmp_path, f"{{every_step: {{retries: {{times: 3}}}}{of_gate}}}"))
        assert [settings.of(step).retries.times for step in ("train", "gate", "promote")] == times


def test_variables_that_only_sound_secret(tmp_path: Path) -> None:
    plain = {
        "TOKENIZERS_PARALLELISM": "false",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token",
        "GOOGLE_APPLICATION_CREDENTIALS": "/etc/gcs/key.json",
        "MLFLOW_TRACKING_URI": "http://mlflow:5000/@here",
    }
    file = written(tmp_path, json.dumps({"every_step": {"env": plain}}))
    assert load_settings(file).of("gate").env == plain


def test_a_volume_of_all_steps_may_be_that_of_the_training(tmp_path: Path) -> None:
    volume = "{claim: shared, mount_path: /mnt/shared}"
    text = f"{{every_step: {{volumes: [{volume}]}}, train: {{num_nodes: 2}}, train_job: {{volume: {volume}}}}}"
    spec, platform = compiled("resnet50", tmp_path, "--settings", str(written(tmp_path, text)))
    mounts = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-train"]["pvcMount"]
    assert [mount["mountPath"] for mount in mounts] == ["/mnt/shared"]
    container = spec["deploymentSpec"]["executors"]["exec-train"]["container"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert json.loads(variables["ENGINERY_TRAIN_JOB"])["volumes"] == [["shared", "/mnt/shared", ""]]


def test_one_node_keeps_its_checkpoints_in_the_volume_of_the_training(tmp_path: Path) -> None:
    file = written(tmp_path, "train_job: {volume: {claim: shared, mount_path: /mnt/shared, sub_path: a}}")
    spec, platform = compiled("resnet50", tmp_path, "--settings", str(file))
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    mounts = {name: executor.get("pvcMount", []) for name, executor in executors.items()}
    assert [mount["mountPath"] for mount in mounts.pop("exec-train")] == ["/mnt/shared"]
    assert not any(mounts.values())
    variables = spec["deploymentSpec"]["executors"]["exec-train"]["container"]["env"]
    assert {"name": "ENGINERY_TRAIN_VOLUME", "value": "/mnt/shared"} in variables


def test_another_try_comes_after_a_long_one(tmp_path: Path) -> None:
    """KFP's "backoff max duration" is the time of all tries from the start of the first, and an hour by default."""

    def window_s(text: str) -> int:
        spec, _ = compiled("resnet50", tmp_path, "--settings", str(written(tmp_path, text)))
        tasks = spec["root"]["dag"]["tasks"]
        return int(tasks["train"]["retryPolicy"]["backoffMaxDuration"].removesuffix("s"))

    assert window_s("train: {timeout_s: 7200, retries: {times: 2, wait_s: 60, factor: 2}}") == 3 * 7200 + 60 + 120
    assert window_s("train: {retries: {times: 1}}") > 30 * 86400
    assert window_s("train: {retries: {times: 100}}") == 365 * 86400
    assert window_s("train: {retries: {times: 2, window_s: 5000}}") == 5000


def test_settings_help_lists_every_key() -> None:
    rows = list(settings_rows())
    shown = enginery("submit", "--settings-help").output
    assert all(key in shown for key, _, _ in rows)
    assert {key.split(".")[0] for key, _, _ in rows} == {
        field.alias or name for name, field in ClusterSettings.model_fields.items()
    }
