"""The table of tasks and of their differences, which imports neither torch nor DALI.

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
        data: What it trains on, for help.
        predictions: The class of what is kept of outputs, "module:Class".
        training_score: Of what training validates by, where that is not the score.
        of_text: Whether samples are pairs of sentences, and not images with labels.
        usual_num_classes: Of the data that networks are compared on, where the user's is not known yet; of text the
            tokens that `preprocess.vocabulary_size` allows.
        purpose: What a model is for, with {number} and {names} of its classes, or {source} and {target} of text.
        agreement: What two models agree on, and a share of which things: "the same ... on 99 % of the ...".
        pipeline: The one that trains for it, by its name.
        classifies: An image has one class. The score is the share of images that are right, a model's answers are
            classes with probabilities, and networks are those of torchvision and timm. Others have `answers` and
            `networks` of their own.
    """

    name: TaskName
    score_name: str
    label_member: str
    data: str
    predictions: str
    usual_num_classes: int
    purpose: str
    agreement: tuple[str, str]
    pipeline: str
    module: str = ""
    training_score: str = ""
    of_text: bool = False
    classifies: bool = False

    @property
    def unit(self) -> str:
        """The unit of counts for people."""
        return "sentences" if self.of_text else "images"


TASKS: dict[TaskName, TaskSpec] = {
    spec.name: spec
    for spec in (
        TaskSpec(
            name="classification",
            score_name="top-1",
            label_member="cls",
            data="Labelled images: a folder with one sub-folder per class or with train/ and val/, a tar or zip of it, "
            "WebDataset tars, or a CSV or Parquet table; a path or a URI such as s3://BUCKET/FOLDER.",
            predictions="components.common.data.evaluation:ClassPredictions",
            usual_num_classes=1000,  # ImageNet
            purpose="Sorting images into {number} classes: {names}. Images that show none of the classes get one of "
            "them all the same.",
            agreement=("class", "images"),
            pipeline="resnet50",
            classifies=True,
        ),
        TaskSpec(
            name="detection",
            score_name="mAP",
            label_member="boxes",
            data="Images with boxes: a folder, or a tar or zip of it, with annotations in COCO JSON, Pascal VOC XML or "
            "YOLO text files, in train/ and val/ or together; a path or a URI such as s3://BUCKET/FOLDER.",
            module="detection.task",
            predictions="components.common.tasks.detection.predictions:BoxPredictions",
            usual_num_classes=80,  # COCO
            purpose="Finding objects of {number} classes in images, with their boxes: {names}.",
            agreement=("box", "objects found"),
            pipeline="detection",
        ),
        TaskSpec(
            name="segmentation",
            score_name="mIoU",
            label_member="mask",
            data="Images with masks: a folder, or a tar or zip of it, with images/, PNG files of the same names in "
            "masks/ and classes.txt, or with COCO JSON of polygons or run lengths, in train/ and val/ or together; a "
            "path or a URI such as s3://BUCKET/FOLDER.",
            module="segmentation.task",
            predictions="components.common.tasks.segmentation.predictions:MaskPredictions",
            usual_num_classes=21,  # PASCAL VOC
            purpose="Giving each pixel of an image one of {number} classes: {names}. Pixels that show none of the "
            "classes get one of them all the same.",
            agreement=("class", "pixels"),
            pipeline="segmentation",
        ),
        TaskSpec(
            name="translation",
            score_name="BLEU",
            label_member="",
            data="Pairs of sentences: a file (.tsv or .tmx, each also with .gz), or a folder with such files or with "
            "Moses' pairs (NAME.en and NAME.de); a path or a URI such as s3://BUCKET/FOLDER.",
            module="translation.task",
            predictions="components.common.tasks.translation.predictions:TextPredictions",
            usual_num_classes=8000,
            purpose="Translating sentences from {source} to {target}. Sentences of another language get some "
            "translation all the same.",
            agreement=("translation", "sentences"),
            pipeline="translation",
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


def networks_of(name: TaskName) -> "dict[str, Callable[..., nn.Module]]":
    """A task's own networks by name, from the number of classes to one with fresh weights; not of classification.

    Those called FAMILY/timm/NAME also take the name of a backbone of timm.
    """
    found: dict[str, Callable[..., nn.Module]]
    found = import_module(f"components.common.tasks.{name}.networks").ARCHITECTURES
    return found


def task_of(architecture: str) -> TaskName:
    """The task of a network by its name: "segmentation/..." and "detection/..." say it, others classify."""
    prefix = architecture.partition("/")[0]
    return next((name for name in TASKS if name == prefix), "classification")
