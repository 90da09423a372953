"""Settings of gate."""

from components.common.contracts.verdict import Thresholds


class GateConfig(Thresholds):
    """Thresholds of the gate."""
