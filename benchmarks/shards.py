"""Images of a dataset's shards, without DALI."""

import tarfile
from collections.abc import Iterator

from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.data.image_files import IMAGE_EXTENSIONS


def validation_images(dataset: Artifact[DatasetManifest]) -> Iterator[bytes]:
    """Image files of the validation split, in the order of its listing."""
    for shard in dataset.manifest.splits["val"].shards:
        with tarfile.open(dataset.path / shard) as tar:
            for member in tar:
                if member.name.partition(".")[2] in IMAGE_EXTENSIONS:
                    file = tar.extractfile(member)
                    assert file is not None
                    yield file.read()
