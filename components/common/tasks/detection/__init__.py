"""Detection: boxes with classes, scored by mAP@[.5:.95]. `boxes`, `average_precision`, `predictions`: no torch."""
