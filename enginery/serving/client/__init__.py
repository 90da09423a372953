"""A client of a model server that speaks the KServe protocol, version 2: images in, labels and probabilities out."""
