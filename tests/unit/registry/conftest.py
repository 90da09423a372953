"""A registry of its own for each test, a machine with a trust policy, and a checkout of the environments."""

from tests.unit.registered import checkout, machine, made_once, registry, three

__all__ = ["checkout", "machine", "made_once", "registry", "three"]
