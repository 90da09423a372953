"""`python -m components.gate`: the container's command and the laptop's."""

from components.common.process.step import Step
from components.gate.config import GateConfig

STEP = Step(name="gate", config=GateConfig, inputs={"report": "Report that validate wrote."})

if __name__ == "__main__":
    STEP.command()()
