"""Conformance: checks for people who write a backend, and what `polyamp verify` runs.

Subclass `BackendContract` in a test module; see docs/write-a-backend.md.
"""

from polyamp.testing._contract import BackendContract as BackendContract
from polyamp.testing._rules import every_rule as every_rule
from polyamp.testing._traces import Signals as Signals
from polyamp.testing._traces import random_signals as random_signals
from polyamp.testing._training import MOMENTUM as MOMENTUM
from polyamp.testing._training import Batch as Batch
from polyamp.testing._training import Training as Training
from polyamp.testing._training import gradients as gradients

__all__ = [
    "MOMENTUM",
    "BackendContract",
    "Batch",
    "Signals",
    "Training",
    "every_rule",
    "gradients",
    "random_signals",
]
