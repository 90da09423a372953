"""What differs between tasks. A table of them, which imports neither torch nor DALI.

A task is an entry of TASKS and a module with what needs torch: labels of a batch, models, loss, score.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from components.common.tasks.task import Task

TaskName = Literal["classification", "detection", "segmentation"]


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task by name.

    Attributes:
        name: In manifests and settings.
        score_name: Of its score for people.
        label_member: The member of a sample in the shards that holds its label.
        module: With what needs torch, in this package; empty for one called as the task.
    """

    name: TaskName
    score_name: str
    label_member: str
    module: str = ""


TASKS: dict[TaskName, TaskSpec] = {
    spec.name: spec
    for spec in (
        TaskSpec(name="classification", score_name="top-1", label_member="cls"),
        TaskSpec(name="detection", score_name="mAP", label_member="boxes", module="detection.task"),
        TaskSpec(name="segmentation", score_name="mIoU", label_member="mask", module="segmentation.task"),
    )
}


def load_task(name: TaskName) -> "Task":
    """The task's code, which needs torch."""
    task: Task = import_module(f"components.common.tasks.{TASKS[name].module or name}").TASK
    return task
