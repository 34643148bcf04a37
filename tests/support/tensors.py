"""Tensors compared bit for bit."""

from __future__ import annotations

import torch


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit for bit: random bytes hold NaNs, which are not equal to themselves."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and torch.equal(
            left[name].reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8)
        )
        for name in left
    )
