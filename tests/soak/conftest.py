"""The trained tiny model of the end-to-end tests."""

from tests.e2e.conftest import trained

__all__ = ["trained"]
