"""What the steps share: contracts (manifests, TransformSpec), loaders, runners, tracking."""
