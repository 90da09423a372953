"""Check that the images fit together: one release, one TensorRT and DALI, a driver as documented.

`python containers/check_versions.py` compares what the repository says. With `--images REGISTRY TAG` it asks built
images, too; with `--release` it wants every base pinned by digest.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = "stand-in"  # the bases of the smoke tests
IMAGES = ("preprocess", "train", "export", "validate", "analyze", "promote", "serve", "mlflow", "cli")
# CUDA's major version -> oldest driver that runs it (NVIDIA, CUDA Toolkit release notes, minor version compatibility).
OLDEST_DRIVER = {"12": "525.60.13", "13": "580.65.06"}
TENSORRT, DALI = "tensorrt-cu13", "nvidia-dali-cuda130"
# What NVIDIA's bases bring and pyproject.toml pins -> where else its version stands.
PINNED = {
    TENSORRT: ("constraints.txt",),
    DALI: ("constraints.txt", "containers/base.txt", "containers/serve/requirements.txt"),
}
_VARIABLE = re.compile(r'^variable "(\w+)" \{ default = "([^"]*)" \}$', re.MULTILINE)
_BASE = re.compile(r"^ARG BASE_IMAGE=(\S+)$", re.MULTILINE)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def read_versions(text: str) -> dict[str, str]:
    """The variables of versions.hcl."""
    return dict(_VARIABLE.findall(text))


def driver_number(version: str) -> tuple[int, ...]:
    """A driver's version in the order of time: "580.65.06" is (580, 65, 6)."""
    return tuple(int(part) for part in version.split("."))


def said_problems(versions: Mapping[str, str], *, release: bool = False) -> list[str]:
    """Return the contradictions in versions.hcl, one line each."""
    found = _driver_problems(versions["CUDA"], versions["MIN_DRIVER"], "the bases' CUDA")
    for name in ("PYTORCH_DIGEST", "TRITON_DIGEST", "PYTHON_DIGEST"):
        if versions[name] and not _DIGEST.fullmatch(versions[name]):
            found.append(f"{name} is {versions[name]!r}, no digest such as sha256:...; write it with containers/pin")
        if release and not versions[name]:
            found.append(f"{name} is empty, and a release is built on pinned bases only: run containers/pin")
    found += [
        f"{image.upper()}_BUDGET_MB is missing" for image in IMAGES if f"{image.upper()}_BUDGET_MB" not in versions
    ]
    return found


def default_problems(versions: Mapping[str, str], dockerfiles: Mapping[str, str]) -> list[str]:
    """Return which Dockerfiles, by their folder, have another default base than the release's, one line each."""
    bases = dict.fromkeys(("promote", "mlflow", "cli"), f"python:{versions['PYTHON_TAG']}")
    bases["steps"] = f"nvcr.io/nvidia/pytorch:{versions['NGC_RELEASE']}-py3"
    bases["serve"] = f"nvcr.io/nvidia/tritonserver:{versions['NGC_RELEASE']}-py3"
    return [
        f"containers/{folder}/Dockerfile has the base {default}, and versions.hcl says {bases[folder]}"
        for folder, text in dockerfiles.items()
        if (default := _BASE.findall(text)) != [bases[folder]]
    ]


def document_problems(versions: Mapping[str, str], documents: Mapping[str, str]) -> list[str]:
    """Return which documents, by name, don't name the driver branch that the images need, one line each."""
    branch = f"R{versions['MIN_DRIVER'].split('.')[0]}"
    return [
        f"{name} does not name the driver branch {branch}" for name, text in documents.items() if branch not in text
    ]


def pin_problems(files: Mapping[str, str]) -> list[str]:
    """Return which files, by name, have another TensorRT or DALI than pyproject.toml, or none, one line each."""
    return [
        f"{name} has {package} {', '.join(found) or 'of no version'}, and pyproject.toml pins {pinned(package)}: "
        "`make lock` writes it there; containers/base.txt is written manually"
        for package, names in PINNED.items()
        for name in names
        if (found := _pins(package, files[name])) != [pinned(package)]
    ]


def pinned(package: str) -> str:
    """The version of a package, in full, that pyproject.toml names."""
    return ", ".join(_pins(package, (ROOT / "pyproject.toml").read_text(encoding="utf-8")))


def _pins(package: str, text: str) -> list[str]:
    return re.findall(rf"\b{re.escape(package)}==([\w.]+)", text)


def image_problems(versions: Mapping[str, str], variables: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return how built images of export and serve differ from what is said, by variables of NVIDIA's bases.

    Args:
        versions: of versions.hcl.
        variables: of the images "export" and "serve".
    """
    found = []
    for image, given in variables.items():
        carried = given.get("TRT_VERSION", "").partition("+")[0]  # some add their CUDA, such as "11.2.1.2+cuda13.3"
        if carried != pinned(TENSORRT):
            found.append(
                f"{image} carries TensorRT {carried or 'of no known version'}, and pyproject.toml pins "
                f"{pinned(TENSORRT)}: a plan runs only on the TensorRT that built it. Pin that of the release there, "
                "and run `make lock`; where export and serve differ, take a release in which they agree"
            )
        cuda = given.get("CUDA_VERSION", "")
        found += _driver_problems(cuda, versions["MIN_DRIVER"], f"{image}'s CUDA")
    return found


def _driver_problems(cuda: str, documented: str, what: str) -> list[str]:
    needed = OLDEST_DRIVER.get(cuda.split(".")[0])
    if needed is None:
        return [
            f"{what} is {cuda or 'of no known version'}, whose driver is not in OLDEST_DRIVER of {Path(__file__).name}"
        ]
    if driver_number(needed) > driver_number(documented):
        return [f"{what} {cuda} needs the driver {needed}, and {documented} is documented (MIN_DRIVER)"]
    return []


def _variables(reference: str) -> dict[str, str]:
    command = ["docker", "image", "inspect", "--format", "{{json .Config.Env}}", reference]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"can't look into {reference}: {done.stderr.strip()}. Build it: make images")
    return dict(entry.split("=", 1) for entry in json.loads(done.stdout) or ())


def main() -> None:
    """Print what does not fit, and end with 1 if anything does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="store_true", help="every base must be pinned by digest")
    parser.add_argument("--images", nargs=2, metavar=("REGISTRY", "TAG"), help="look into built images, too")
    arguments = parser.parse_args()
    versions = read_versions((ROOT / "containers/versions.hcl").read_text(encoding="utf-8"))
    files = ROOT.glob("containers/*/Dockerfile")
    dockerfiles = {file.parent.name: file.read_text(encoding="utf-8") for file in files if file.parent.name != STAND_IN}
    documents = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/containers.md")}
    found = said_problems(versions, release=arguments.release)
    found += default_problems(versions, dockerfiles) + document_problems(versions, documents)
    found += pin_problems(
        {name: (ROOT / name).read_text(encoding="utf-8") for names in PINNED.values() for name in names}
    )
    if arguments.images:
        registry, tag = arguments.images
        found += image_problems(versions, {i: _variables(f"{registry}/{i}:{tag}") for i in ("export", "serve")})
    if found:
        sys.exit("\n".join(found))
    held = f"TensorRT {pinned(TENSORRT)}, DALI {pinned(DALI)}"
    print(f"NGC {versions['NGC_RELEASE']}, {held}, driver {versions['MIN_DRIVER']}")


if __name__ == "__main__":
    main()
