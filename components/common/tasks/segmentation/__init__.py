"""Segmentation: a class for each pixel, scored by mIoU. `predictions` and `pictures` need no torch."""

VOID = 255
"""The value in a mask of pixels that belong to no class: neither learned nor scored."""
