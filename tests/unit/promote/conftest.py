"""A registry of its own for each test: real MLflow on SQLite."""

from tests.unit.registered import registry

__all__ = ["registry"]
