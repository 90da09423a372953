"""Models of Triton's Python backend: preprocessing, labels, and a network on a CPU.

A model repository of `enginery serve export` names these modules in its model.py files.
"""
