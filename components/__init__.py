"""The steps of the chain: one package per step, and what they share in `common`."""
