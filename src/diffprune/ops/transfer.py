"""Tensors made on the host, brought to a device without waiting for it."""

import torch
from torch import Tensor


def to_device(value: Tensor, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on the device; a copy to a GPU goes through pinned memory and is queued behind what runs there.

    A plain copy waits until the device has come to it, and what the host would have queued meanwhile comes late.
    """
    device, dtype = torch.device(device), dtype or value.dtype
    if device.type != "cuda" or value.device.type != "cpu":
        return value.to(device, dtype)
    return value.to(dtype).pin_memory().to(device, non_blocking=True)
