"""Contracts between the steps: manifests, records, TransformSpec, settings, errors, verdict."""
