"""Shared by test_torch_clip, test_torch_clip_torch, test_torch_clip_order."""

from __future__ import annotations

import pytest
import torch
from torch_scaler_cases import (
    OPTIMIZERS,
    parameter,
)

both_kinds = pytest.mark.parametrize("kind", OPTIMIZERS)


def one(kind, *values, **options):
    p = parameter(*values)
    return p, OPTIMIZERS[kind]([p], **options)


def give(scaler, p, *grads):
    """Gradients that carry the scale, of the true values `grads`."""
    scaler.scale(torch.ones(()))
    p.grad = torch.tensor(grads, dtype=p.dtype) * scaler.get_scale()
