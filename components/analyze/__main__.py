"""`python -m components.analyze`: the container's command and the laptop's."""

from components.analyze.config import AnalyzeConfig
from components.common.process.step import Step

STEP = Step(name="analyze", config=AnalyzeConfig, inputs={"bundle": "Bundle that export wrote."})

if __name__ == "__main__":
    STEP.command()()
