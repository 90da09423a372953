"""Settings of gate."""

from components.common.verdict import Thresholds


class GateConfig(Thresholds):
    """What a model must fulfil."""
