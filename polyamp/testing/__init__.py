"""Checks for people who write a backend: subclass `BackendContract` in a test module."""

from polyamp.testing._contract import BackendContract as BackendContract

__all__ = ["BackendContract"]
