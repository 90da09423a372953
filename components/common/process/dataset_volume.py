"""Datasets in a volume that the pods of a run share, so that they do not travel through Kubeflow Pipelines' store.

With the variable below a step writes a dataset to `enginery/datasets/<digest>` in that volume, and leaves in its own
output the manifest alone, which is what KFP keeps. Steps that get such a manifest read the files from the volume.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from components.common.contracts.digests import digest_bytes, digest_json
from components.common.contracts.environment import KFP_RUN_VARIABLE
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import MANIFEST, prepare_directory, write_atomically

VARIABLE = "ENGINERY_DATASETS"  # where the volume is mounted


def folder_of(root: Path, digest: str) -> Path:
    """Return the folder in a volume of the dataset with the manifest of this digest."""
    return root / "enginery/datasets" / digest.removeprefix("sha256:")[:32]


def dataset_volumes() -> list[Path]:
    """Return the folder on which the volume for datasets is mounted; nothing where there is none."""
    return [Path(mounted)] if (mounted := os.environ.get(VARIABLE)) else []


def make_folder(root: Path, name: str, setting: str) -> Path:
    """A folder of a volume, made if it is not there.

    Raises:
        UserError: the volume of this setting is not mounted, or can't be written.
    """
    if not root.is_dir():
        text = f"the volume of {setting} is not there: {root} is no folder of this pod; see its mount_path"
        raise UserError(text, code="no-volume", setting=setting)
    folder = root / "enginery" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except PermissionError:
        raise UserError(
            f"this step may not write to the volume of {setting} at {root}: it runs as user {os.getuid()} and group "
            f"{os.getgid()}; make the volume writable for that group",
            code="volume-not-writable",
            setting=setting,
        ) from None
    return folder


def write_dataset(write: Callable[[Path], str], what: object, output: Path) -> str:
    """Let a step write its output: into the volume, where there is one.

    Args:
        write: The step's work, which takes the directory of its output.
        what: What the output depends on, as JSON: another try of the same step resumes what was begun.
        output: The step's own output directory, which gets the manifest.
    """
    if not (volumes := dataset_volumes()):
        return write(output)
    prepare_directory(output)
    (root,) = volumes
    name = digest_json([os.environ.get(KFP_RUN_VARIABLE, ""), what]).removeprefix("sha256:")[:32]
    begun = make_folder(root, "begun", "dataset_volume") / name
    outcome = write(begun)
    manifest = (begun / MANIFEST).read_bytes()
    target = folder_of(root, digest_bytes(manifest))
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # another run has written the same
        begun.rename(target)
    shutil.rmtree(begun, ignore_errors=True)
    write_atomically(output / MANIFEST, manifest)
    return outcome


def find_dataset(path: Path) -> Path:
    """Return the folder of a dataset's files: its own directory, or that of the volume which has them.

    Raises:
        EngineryError: this is a manifest of the volume, and the volume has its files no more.
    """
    if not (volumes := dataset_volumes()) or os.listdir(path) != [MANIFEST]:
        return path
    manifest = (path / MANIFEST).read_bytes()
    target = folder_of(volumes[0], digest_bytes(manifest))
    with suppress(OSError):
        if (target / MANIFEST).read_bytes() == manifest:
            return target
    raise EngineryError(
        f"the volume of dataset_volume has no dataset {target.name} in {target.parent}; it was removed, or is in "
        "another volume. Run preprocess again, without KFP's cache",
        code="dataset-not-in-volume",
    )
