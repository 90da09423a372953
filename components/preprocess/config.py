"""Settings of preprocess."""

from components.common.dataset.settings import DatasetSettings


class PreprocessConfig(DatasetSettings):
    """Settings of finding, splitting, checking and packing images."""
