"""The repository as Triton loads it: whether it is what was exported, and what its models need to know."""

import os
from pathlib import Path

from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import ALL_FILES, MANIFEST, Artifact, RepositoryManifest, load
from components.common.contracts.records import EngineEntry
from components.common.registry.trust import SIGNATURE, STATEMENTS

VERSION = "1"  # folder of the only version of each model
CPU = "cpu"  # name of the configurations for a server without a GPU: `tritonserver --model-config-name=cpu`
STATISTICS_TENSOR = "STATISTICS"  # IMAGE_STATISTICS, from preprocessing to the counting of predictions
SIZES_TENSOR = "SIZES"  # width and height of an image as it was sent, for boxes and masks
ANSWER_TENSOR = "ANSWER"  # JSON: see components/common/tasks/answers.py
TEXT_TENSOR, TRANSLATION_TENSOR = "TEXT", "TRANSLATION"  # a sentence in UTF-8 each
EXAMPLES_VARIABLE = "ENGINERY_EXAMPLES"  # folder of example images, where the repository lets them be kept
_TENSORRT_VARIABLES = ("TRT_VERSION", "TENSORRT_VERSION")  # NVIDIA's images name what they hold in one of these


def open_repository(root: Path, *, bytecode: bool = False) -> Artifact[RepositoryManifest]:
    """Check every file of a model repository by its digest.

    Args:
        root: its folder.
        bytecode: whether Python may have kept compiled modules in it. A server's may, once it has run them; before
            that they are refused, since they would be run in the place of the sources that were checked.

    Raises:
        UserError: it is none.
        EngineryError: it was changed since it was exported, or something was added.
    """
    repository = load(root, RepositoryManifest, verify=ALL_FILES)
    beside = (SIGNATURE, *(file.name for file in root.glob(STATEMENTS) if not file.is_symlink()))
    files = {MANIFEST, *beside, *repository.manifest.files}
    folders = {folder.as_posix() for file in files for folder in Path(file).parents}
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        is_folder = path.is_dir() and not path.is_symlink()
        if inside.as_posix() in (folders if is_folder else files) or (bytecode and "__pycache__" in inside.parts):
            continue
        raise EngineryError(
            f"{path} is not named in {root / MANIFEST}: it was added. Remove it, or export again", code="foreign-file"
        )
    return repository


def open_from(model_folder: Path) -> Artifact[RepositoryManifest]:
    """Open the repository for one of its models as it starts. A server refuses to start where this fails.

    Raises:
        EngineryError: see `open_repository`; or the plans were built by another TensorRT than this image has.
    """
    root = model_folder.absolute().parent
    if not (root / MANIFEST).is_file():
        raise EngineryError(
            f"{root} has no {MANIFEST}: give Triton the whole folder that `enginery serve export` wrote, on a disk",
            code="no-manifest",
        )
    repository = open_repository(root, bytecode=True)
    if problem := _version_problem(repository.manifest.engines):
        raise EngineryError(problem, code="other-tensorrt")
    return repository


def _version_problem(engines: tuple[EngineEntry, ...]) -> str:
    """Return the reason why plans can't run in this image; empty where they can, or the image names no TensorRT."""
    own = next((os.environ[name] for name in _TENSORRT_VARIABLES if os.environ.get(name)), "")
    needs = dict.fromkeys(engine.needs for engine in engines if own and not engine.fits_tensorrt(own))
    if not needs:
        return ""
    return (
        f"the plans need {'; '.join(needs)}, and this image has TensorRT {own}. Serve with an image that has theirs, "
        "or build plans in the image `export` of the same release: `enginery engines BUNDLE --data DIR --in-containers`"
    )
