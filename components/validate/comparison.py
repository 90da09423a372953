"""A precision against FP32 on the same images: overall and class by class, and what of it may be chance."""

import numpy as np

from components.common.evaluation import Predictions
from components.common.records import ClassLoss, Comparison
from components.common.statistics import SIGNIFICANCE, drop_lower, drop_upper, holm, mcnemar, paired_difference
from components.validate.schema import ClassChange


def compare(fp32: Predictions, own: Predictions) -> Comparison:
    """Lost and gained images, the difference in top-1 with its one-sided 95 % intervals, and McNemar's test."""
    difference = paired_difference(fp32.right, own.right)
    counts = difference.num_images, difference.num_lost, difference.num_gained
    test = mcnemar(difference.num_lost, difference.num_gained)
    return Comparison(
        num_images=difference.num_images,
        num_lost=difference.num_lost,
        num_gained=difference.num_gained,
        delta_top1_points=difference.delta_points,
        drop_lower_points=drop_lower(*counts),
        drop_upper_points=drop_upper(*counts),
        mcnemar_p=test.p_value,
        mcnemar_test=test.test,
    )


def class_changes(classes: tuple[str, ...], fp32: Predictions, own: Predictions) -> tuple[ClassChange, ...]:
    """Accuracy on each class that has images, the worst change first.

    p-values are corrected for as many tests as there are classes with a lost or gained image. McNemar's test takes
    the number of these as given, and without any there is nothing to test: such a class has p = 1 in any case.
    """
    num_classes, labels = len(classes), own.labels
    counts = np.bincount(labels, minlength=num_classes)  # [classes] images, as all below
    right_fp32, right_own = (np.bincount(labels[entry.right], minlength=num_classes) for entry in (fp32, own))
    lost = np.bincount(labels[fp32.right & ~own.right], minlength=num_classes)
    gained = np.bincount(labels[~fp32.right & own.right], minlength=num_classes)
    tested = np.flatnonzero(lost + gained).tolist()
    p_values = [mcnemar(int(lost[index]), int(gained[index])).p_value for index in tested]
    corrected = dict(zip(tested, holm(p_values), strict=True))
    changes = [
        ClassChange(
            name=classes[index],
            num_images=int(counts[index]),
            fp32_pct=100 * float(right_fp32[index] / counts[index]),
            own_pct=100 * float(right_own[index] / counts[index]),
            delta_points=100 * float((gained[index] - lost[index]) / counts[index]),
            num_lost=int(lost[index]),
            num_gained=int(gained[index]),
            p_corrected=corrected.get(index, 1.0),
            significant=corrected.get(index, 1.0) < SIGNIFICANCE,
        )
        for index in np.flatnonzero(counts).tolist()
    ]
    return tuple(sorted(changes, key=lambda entry: entry.delta_points))


def class_losses(changes: tuple[ClassChange, ...]) -> tuple[tuple[ClassLoss, ...], ClassLoss | None]:
    """The classes that are significantly worse than with FP32, and the one that loses most; None if none does."""
    losses = [
        (entry.significant, ClassLoss(**entry.model_dump(include=set(ClassLoss.model_fields))))
        for entry in changes
        if entry.delta_points < 0
    ]
    return tuple(loss for significant, loss in losses if significant), losses[0][1] if losses else None
