"""`python -m components.merge`: the container's command and the laptop's."""

import os

from components.common.process.step import Step
from components.merge.config import MergeConfig

STEP = Step(name="merge", config=MergeConfig, inputs={}, writes_dataset=True)

if __name__ == "__main__":
    # NumPy's library would have threads of its own that spin beside those of the search for near-duplicates.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    STEP.command()()
