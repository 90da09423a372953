"""What a release folder holds."""

from typing import Final, Literal

from pydantic import Field

from components.common.artifacts import MANIFEST
from components.common.records import Precision, Record

BUNDLE: Final = "bundle"
REPORT: Final = "report"
VERDICT: Final = "verdict"  # folders, each an artifact with its manifest
RECORD = "release.json"
BOM = "inputs.cdx.json"
CARD = "MODEL_CARD.md"
REPORT_CARD = "model_card.md"  # what it is a copy of
MODEL_FILES = ("MLmodel", "requirements.txt", "python_env.yaml")  # the release is a model of MLflow, too
SUMS = "SHA256SUMS"
OLD_SIGNATURE = "SHA256SUMS.sig"  # Ed25519, of releases up to version 0.1
ROOT_FILES = (RECORD, BOM, CARD, *MODEL_FILES)  # what SUMS lists besides the three artifacts
REQUIRED = (*ROOT_FILES, *(f"{part}/{MANIFEST}" for part in (BUNDLE, REPORT, VERDICT)))


class Forced(Record):
    """Who overruled the gate."""

    who: str
    when: str
    why: str


class ReleaseRecord(Record):
    """release.json: which model this is."""

    schema_version: Literal[1] = 1
    name: str = Field(description="Of the registered model.")
    version: str = Field(description="In the registry; empty for a bundle that was named by its path.")
    aliases: tuple[str, ...] = Field(description="Of the version, when it was released.")
    registry: str = Field(
        description="Where it was registered, of a file its name alone; empty for a bundle that was named by its path."
    )
    created: str = Field(description="When it was released, in UTC: YYYY-MM-DDThh:mm:ssZ.")
    enginery: str = Field(description="Version of the package that wrote the release.")
    architecture: str
    precision: Precision = Field(description="What `mlflow.pyfunc.load_model` runs.")
    passed: bool = Field(description="Whether the verdict is a pass.")
    forced: Forced | None = Field(None, description="In releases up to version 0.1: who overruled the verdict.")
    digests: dict[str, str] = Field(
        description="Manifest digests of dataset, model (what was exported), bundle, report and verdict."
    )
    key_fingerprint: str = Field("", description="Of the public key that belongs to the signature; empty for none.")

    @property
    def label(self) -> str:
        """For a person."""
        return f"{self.name} version {self.version}" if self.version else self.name
