"""`python -m components.preprocess`: the container's command and the laptop's."""

from components.common.process.step import Step
from components.preprocess.config import PreprocessConfig

STEP = Step(name="preprocess", config=PreprocessConfig, inputs={}, writes_dataset=True)

if __name__ == "__main__":
    STEP.command()()
