"""`python -m components.preprocess`: the container's command and the laptop's."""

import os

from components.common.process.step import Step
from components.preprocess.config import PreprocessConfig

STEP = Step(name="preprocess", config=PreprocessConfig, inputs={}, writes_dataset=True)

if __name__ == "__main__":
    # NumPy's library would have threads of its own that spin beside those of the search for near-duplicates.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    STEP.command()()
