"""Settings of gate."""

from components.common.contracts.verdict import Thresholds


class GateConfig(Thresholds):
    """What a model must fulfil."""
