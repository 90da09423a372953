"""Records of promotions: how a version compares with the champion, and one entry of a model's audit log."""

import re
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field

from components.common.contracts.records import Precision, Record
from components.common.contracts.statistics import difference_interval, mcnemar, paired_counts

if TYPE_CHECKING:
    import numpy as np

CHAMPION = "champion"

_ALIAS = re.compile(r"[A-Za-z0-9_-]{1,100}")
_RESERVED = re.compile(r"latest|v[0-9]+", re.IGNORECASE)


def check_alias(alias: str) -> str:
    """The alias itself.

    Raises:
        ValueError: MLflow would refuse it, as it does only when the change is in the audit log already.
    """
    if not _ALIAS.fullmatch(alias):
        raise ValueError(f"an alias is letters, digits, - and _, at most 100, such as staging; got {alias!r}")
    if _RESERVED.fullmatch(alias):
        raise ValueError(f"MLflow keeps {alias!r} for itself, as latest, v1, v2 and so on; name another alias")
    return alias


Kind = Literal["promote", "manual", "rollback"]


class PairedImages(Record):
    """The images on which only one of two versions is right, and how certain the difference in score is."""

    num_regressed: int = Field(description="Images that the champion gets right and the version gets wrong.")
    num_improved: int = Field(description="Images that the champion gets wrong and the version gets right.")
    low_points: float = Field(description="Lower end of the one-sided 95 % interval of the difference (Tango, 1998).")
    high_points: float = Field(description="Upper end, likewise.")
    mcnemar_p: float = Field(description="Two-sided p-value of McNemar's test.")

    @classmethod
    def of(cls, right_champion: "np.ndarray", right_version: "np.ndarray") -> Self:
        """All that follows from [N] bool, whether each is right on an image."""
        num_images, regressed, improved = paired_counts(right_champion, right_version)
        low_points, high_points = difference_interval(num_images, regressed, improved)
        return cls(
            num_regressed=regressed,
            num_improved=improved,
            low_points=low_points,
            high_points=high_points,
            mcnemar_p=mcnemar(regressed, improved)[0],
        )


class ChampionComparison(Record):
    """A version beside the champion, on the same validation images."""

    champion_version: str
    champion_precision: Precision
    champion_score_pct: float
    precision: Precision = Field(description="What the version's verdict recommends.")
    score_pct: float
    score_name: str = "top-1"
    delta_points: float = Field(description="Score of the version minus that of the champion, in percentage points.")
    tolerance_points: float = Field(description="How much worse a new champion may be, in percentage points.")
    not_worse: bool
    split_digest: str = Field(description="Of the validation images that both were measured on.")
    num_images: int
    measured_again: str = Field(
        "", description="What ran the champion on these images now; empty where its own report is on them."
    )
    paired: PairedImages | None = Field(None, description="None where the predictions of one are not at hand.")

    @property
    def text(self) -> str:
        """One clause for a person."""
        again = f", measured again with {self.measured_again}" if self.measured_again else ""
        return (
            f"{self.score_name} {self.score_pct:.2f} % ({self.precision.upper()}), champion version "
            f"{self.champion_version} {self.champion_score_pct:.2f} % ({self.champion_precision.upper()}{again}) on "
            f"the same validation split of {self.num_images:,}"
        )


class AliasChange(Record):
    """The version that an alias pointed to, None for none, and the one that it is to point to."""

    before: str | None
    after: str = Field(pattern="^[0-9]{1,9}$")


class Change(Record):
    """One entry of the audit log, as it was decided and before any alias was touched. Never changed afterwards."""

    schema_version: Literal[2] = 2
    model: str
    kind: Kind
    changes: dict[Annotated[str, AfterValidator(check_alias)], AliasChange] = Field(description="By alias.")
    why: str
    forced: bool = Field(False, description="Whether --force overruled a refusal.")
    overruled: str = Field("", description="The refusal that --force overruled.")
    when: str = Field(description="UTC.")
    who: str = Field(description="USER@HOST.")
    run_id: str = Field("", description="MLflow run that asked for it; empty for a person at a terminal.")
    digests: dict[str, str] = Field(
        default_factory=dict, description="Of dataset, validation split, bundle, report and verdict, where known."
    )
    comparison: ChampionComparison | None = Field(None, description="None where nothing was compared.")
