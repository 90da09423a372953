"""Shared by the steps: contracts (manifests, TransformSpec), loaders, runners, tracking."""
