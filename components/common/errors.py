"""Errors a user can cause or must act on. Every message says what failed, the value seen, and the fix."""

from components.common.shown import shown

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_GATE_FAILED = 3
EXIT_PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
EXIT_INTERRUPTED = 130  # as shells say it of Ctrl-C


class EngineryError(Exception):
    """A failure with a message meant for the user. `exit_code` is what the process ends with."""

    exit_code = EXIT_FAILURE

    def __init__(self, message: str = "") -> None:
        super().__init__(shown(message))


class UserError(EngineryError):
    """The user's input or environment is at fault, and the message says how to mend it."""

    exit_code = EXIT_USER_ERROR


class GateFailed(EngineryError):
    """The model did not pass its gate. The report is already written when this is raised."""

    exit_code = EXIT_GATE_FAILED


class RuntimeUnavailable(EngineryError):
    """An inference runtime (TensorRT, OpenVINO, ...) is not usable here. The message says what to install."""


class Preempted(KeyboardInterrupt):
    """SIGTERM came, what was done so far is saved, and the same command goes on from there.

    A KeyboardInterrupt, because nothing failed: whoever handles that one (MLflow's status, the run) is right here, too.
    """

    exit_code = EXIT_PREEMPTED
