"""`python -m components.train`: the container's command and the laptop's."""

from components.common.process.step import Step
from components.train.config import TrainConfig

STEP = Step(name="train", config=TrainConfig, inputs={"dataset": "Dataset that preprocess wrote."}, is_preemptible=True)

if __name__ == "__main__":
    STEP.command()()
