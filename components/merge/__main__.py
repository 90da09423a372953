"""`python -m components.merge`: the container's command and the laptop's."""

from components.common.process.step import Step
from components.merge.config import MergeConfig

STEP = Step(name="merge", config=MergeConfig, inputs={}, writes_dataset=True)

if __name__ == "__main__":
    STEP.command()()
