"""Preloaded by a standby, it gives it a CUDA context ahead of time."""

import torch

if torch.cuda.is_available():
    torch.zeros(1, device="cuda")
