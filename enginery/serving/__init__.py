"""A promoted model behind Triton: the model repository, and a server on this machine."""
