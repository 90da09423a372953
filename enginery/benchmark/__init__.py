"""The classic table of inference: network by batch size, in images/s, W, images/s/W and ms.

Its columns are those of NVIDIA's whitepaper "NVIDIA deep learning platform" (2018), whose rows of Tesla V100, Tesla P4
and Jetson stand beside what is measured here.
"""
