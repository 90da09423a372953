"""Detection: boxes with classes, scored by mAP@[.5:.95]. `boxes` and `average_precision` need numpy alone."""
