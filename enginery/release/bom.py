"""The bill of materials of a model in CycloneDX's JSON (1.6): data, model, code, libraries and drivers, with digests.

https://cyclonedx.org/docs/1.6/json/ describes the form. Written here, because the CycloneDX library for Python knows no
machine-learning models.
"""

import uuid
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from components.common.contracts.digests import canonical_json, digest_bytes
from components.common.contracts.environment import Environment
from components.common.contracts.manifests import Artifact, BundleManifest, ReportManifest
from enginery.release.verify import ReleaseRecord

_PACKAGES = {"dali": "nvidia-dali-cuda130", "tensorrt": "tensorrt-cu13"}  # where PyPI's name is another
_Json = dict[str, Any]


def bill_of_materials(
    record: ReleaseRecord, bundle: Artifact[BundleManifest], report: Artifact[ReportManifest], provenance: _Json
) -> bytes:
    """The list as a file's content; the same for the same arguments.

    Args:
        record: which release.
        bundle: of it.
        report: of it.
        provenance: of report.json: code, digests, and the environment of each step.
    """
    environments = {step: Environment.model_validate(seen) for step, seen in provenance["environments"].items()}
    data = _dataset(record, provenance["digests"])
    trained = bundle.manifest.training
    name, origin = ("checkpoint", "a checkpoint of this chain") if trained else ("model", "a model of the user")
    text, digest = f"What was exported: {origin}", record.digests["model"]
    model = _component("machine-learning-model", "model", name, description=text, digest=digest)
    components = [data, model, _code(provenance["code"]), *_libraries(environments), *_platforms(environments)]
    components += _build_tools(bundle.manifest)
    subject = _subject(record, bundle, report)
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": record.created, "component": subject},
        "components": components,
        "dependencies": [{"ref": subject["bom-ref"], "dependsOn": [entry["bom-ref"] for entry in components]}],
    }
    content = uuid.uuid5(uuid.NAMESPACE_URL, digest_bytes(canonical_json(bom)))
    return canonical_json({**bom, "serialNumber": f"urn:uuid:{content}"}) + b"\n"


def _subject(record: ReleaseRecord, bundle: Artifact[BundleManifest], report: Artifact[ReportManifest]) -> _Json:
    row = report.manifest.accuracy.row(record.precision)
    measured = {"score_pct": row.score_pct, "top5_pct": row.top5_pct, "delta_points": row.delta_points}
    metrics = [{"type": name, "value": f"{value:.4f}"} for name, value in measured.items() if value is not None]
    files = sorted(bundle.manifest.files.items())
    return _component(
        "machine-learning-model",
        "bundle",
        record.name,
        version=record.version or bundle.digest,
        description=f"{record.architecture}, {record.precision.upper()}; the digest is that of bundle/manifest.json",
        digest=bundle.digest,
        modelCard={
            "modelParameters": {
                "task": bundle.manifest.task,
                "modelArchitecture": record.architecture,
                "datasets": [{"ref": "dataset"}],
            },
            "quantitativeAnalysis": {"performanceMetrics": metrics},
        },
        components=[_component("file", "", f"bundle/{name}", digest=entry.digest) for name, entry in files],
        properties={f"{name}_digest": value for name, value in record.digests.items()},
    )


def _dataset(record: ReleaseRecord, digests: dict[str, str]) -> _Json:
    return _component(
        "data",
        "dataset",
        "dataset",
        description="Labelled images in shards; the digest is that of their manifest",
        digest=record.digests["dataset"],
        data=[{"type": "dataset", "name": "dataset"}],
        properties={name: value for name, value in digests.items() if name.endswith(" split")},
    )


def _code(code: _Json) -> _Json:
    facts = {"commit": code["commit"], "modified": str(code["modified"]).lower()}
    return _component("application", "enginery", "enginery", version=code["version"], properties=facts)


def _libraries(environments: dict[str, Environment]) -> Iterator[_Json]:
    """One entry for each library and version, with the steps that ran with it."""
    steps: dict[tuple[str, str], list[str]] = {}
    for step, seen in environments.items():
        for name, version in seen.versions.items():
            steps.setdefault((_PACKAGES.get(name, name), version), []).append(step)
    for (name, version), users in sorted(steps.items()):
        purl = f"pkg:pypi/{name}@{version}"
        yield _component("library", purl, name, purl=purl, version=version, properties={"steps": " ".join(users)})


def _platforms(environments: dict[str, Environment]) -> Iterator[_Json]:
    """Python, the operating system, GPUs and their drivers."""
    steps: dict[tuple[str, str, str], list[str]] = {}
    for step, seen in environments.items():
        found = {("platform", "Python", seen.python), ("operating-system", seen.platform, "")}
        found |= {("device-driver", "NVIDIA driver", gpu.driver) for gpu in seen.gpus}
        found |= {("device", gpu.name, "") for gpu in seen.gpus} | {("device", seen.cpu, "")}
        for entry in found:
            steps.setdefault(entry, []).append(step)
    for (kind, name, version), users in sorted(steps.items()):
        ref, properties = f"{kind}:{name}@{version}", {"steps": " ".join(users)}
        yield _component(kind, ref, name, version=version, properties=properties)


def _build_tools(bundle: BundleManifest) -> Iterator[_Json]:
    """TensorRT and driver of each plan, where the bundle has plans."""
    built: dict[tuple[str, str, str], list[str]] = {}
    for engine in bundle.engines:
        built.setdefault((engine.tensorrt_version, engine.gpu_name, engine.driver_version), []).append(engine.file)
    for (version, gpu, driver), files in sorted(built.items()):
        ref, facts = f"TensorRT@{version} on {gpu}, driver {driver}", {"plans": " ".join(files)}
        yield _component(
            "framework", ref, "TensorRT", version=version, properties={**facts, "gpu": gpu, "driver": driver}
        )


def _component(
    kind: str,
    ref: str,
    name: str,
    *,
    digest: str = "",
    properties: Mapping[str, str] = MappingProxyType({}),
    **rest: Any,
) -> _Json:
    """A component without what is empty. `properties` are enginery's."""
    named = [{"name": f"enginery:{key}", "value": value} for key, value in sorted(properties.items()) if value]
    found = {"type": kind, "bom-ref": ref, "name": name, **rest, "hashes": _hashes(digest), "properties": named}
    return {key: value for key, value in found.items() if value}


def _hashes(digest: str) -> list[_Json]:
    """Return nothing if a digest is not known or not of a file, such as that of a model named by its path."""
    kind, _, content = digest.partition(":")
    return [{"alg": "SHA-256", "content": content}] if kind == "sha256" and len(content) == 64 else []
