"""`python -m components.promote`: the container's command and the laptop's."""

from components.common.process.step import Step
from components.promote.config import PromoteConfig

STEP = Step(
    name="promote",
    config=PromoteConfig,
    uses_registry=True,
    inputs={
        "bundle": "Bundle that export wrote.",
        "report": "Report that validate wrote on it.",
        "verdict": "Verdict that gate wrote on the report.",
        "dataset": "Dataset that validate measured on: a champion of other data is measured on it again.",
    },
)

if __name__ == "__main__":
    STEP.command()()
