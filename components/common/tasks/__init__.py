"""What differs between tasks. A table of them, which imports neither torch nor DALI.

A task is an entry of TASKS and a module with what needs torch: labels of a batch, models, loss, score.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from components.common.tasks.predictions import Predictions
    from components.common.tasks.task import Task

TaskName = Literal["classification", "detection", "segmentation", "translation"]


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task by name.

    Attributes:
        name: In manifests and settings.
        score_name: Of its score for people.
        label_member: The member of a sample in the shards that holds its label; empty for text.
        module: With what needs torch, in this package; empty for one called as the task.
        predictions: The class of what is kept of outputs, "module:Class".
        training_score: Of what training validates by, where that is not the score.
        of_text: Whether samples are pairs of sentences, and not images with labels.
    """

    name: TaskName
    score_name: str
    label_member: str
    predictions: str
    module: str = ""
    training_score: str = ""
    of_text: bool = False


TASKS: dict[TaskName, TaskSpec] = {
    spec.name: spec
    for spec in (
        TaskSpec(
            name="classification",
            score_name="top-1",
            label_member="cls",
            predictions="components.common.data.evaluation:ClassPredictions",
        ),
        TaskSpec(
            name="detection",
            score_name="mAP",
            label_member="boxes",
            module="detection.task",
            predictions="components.common.tasks.detection.predictions:BoxPredictions",
        ),
        TaskSpec(
            name="segmentation",
            score_name="mIoU",
            label_member="mask",
            module="segmentation.task",
            predictions="components.common.tasks.segmentation.predictions:MaskPredictions",
        ),
        TaskSpec(
            name="translation",
            score_name="BLEU",
            label_member="",
            module="translation.task",
            predictions="components.common.tasks.translation.predictions:TextPredictions",
            training_score="of the next tokens",
            of_text=True,
        ),
    )
}


def load_task(name: TaskName) -> "Task":
    """The task's code, which needs torch."""
    task: Task = import_module(f"components.common.tasks.{TASKS[name].module or name}").TASK
    return task


def predictions_of(name: TaskName) -> "type[Predictions]":
    """The class of what is kept of a task's outputs; it needs numpy alone."""
    module, _, kind = TASKS[name].predictions.partition(":")
    found: type[Predictions] = getattr(import_module(module), kind)
    return found


def networks_of(name: TaskName) -> "dict[str, Callable[[int], nn.Module]]":
    """A task's own networks by name, from the number of classes to one with fresh weights; not of classification."""
    found: dict[str, Callable[[int], nn.Module]]
    found = import_module(f"components.common.tasks.{name}.networks").ARCHITECTURES
    return found


def task_of(architecture: str) -> TaskName:
    """The task of a network by its name: "segmentation/..." and "detection/..." say it, others classify."""
    prefix = architecture.partition("/")[0]
    return next((name for name in TASKS if name == prefix), "classification")
