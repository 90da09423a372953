"""`python -m components.validate`: the container's command and the laptop's."""

from components.common.process.step import Step
from components.validate.config import ValidateConfig

STEP = Step(
    name="validate",
    config=ValidateConfig,
    inputs={
        "bundle": "Bundle that export wrote.",
        "dataset": "Dataset that preprocess wrote; its validation split is measured on.",
    },
)

if __name__ == "__main__":
    STEP.command()()
