"""Segmentation: a class for each pixel, scored by mIoU. `predictions` needs no torch."""

VOID = 255
"""The value in a mask of pixels that belong to no class: neither learned nor scored."""
