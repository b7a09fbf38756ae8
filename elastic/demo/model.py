"""A byte-level GPT in the style of nanoGPT (Karpathy, github.com/karpathy/nanoGPT), small enough to train on a CPU.

Owns the network alone: bytes in, next-byte loss out. Where the bytes come from is `data`, how it trains is `bytelm`.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elastic.errors import UsageError

VOCABULARY = 256  # every byte is a token


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Size of the model.

    Raises:
        UsageError: a value is out of range, or two of them do not fit together.
    """

    layers: int = 2
    heads: int = 4
    width: int = 96  # of the residual stream
    context: int = 64  # bytes a prediction can look back on
    dropout: float = 0.0
    tie_weights: bool = True  # the output layer reads with the embedding's weights

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.width % self.heads:
            raise UsageError(f"width {self.width} is not divisible by heads {self.heads}; each head gets an equal part")
        if not 0.0 <= self.dropout < 1.0:
            raise UsageError(f"dropout is {self.dropout:g}; give a share from 0 to below 1")


class CausalSelfAttention(nn.Module):
    """Each position gathers from itself and those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.drop_probability = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:  # (micro_batch, seq, width) -> the same
        batch, seq, width = x.shape
        shape = (batch, seq, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.query_key_value(x).chunk(3, dim=2))
        p = self.drop_probability if self.training else 0.0
        gathered = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)  # (micro_batch, heads, seq, …)
        y: Tensor = self.drop(self.project(gathered.transpose(1, 2).reshape(batch, seq, width)))
        return y


class Block(nn.Module):
    """Attention, then a position-wise network, each added to what comes in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class GPT(nn.Module):
    """Logits of the next byte at every position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.place = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("project.weight", "mlp.2.weight")):  # 2 per layer add up in the residual stream (GPT-2)
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))
        if config.tie_weights:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:  # (micro_batch, seq) -> (micro_batch, seq, VOCABULARY)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.embed(tokens) + self.place(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    """GPT-2's: normal with a deviation of 0.02, no bias."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def next_byte_loss(model: nn.Module, windows: Tensor) -> tuple[Tensor, int]:
    """(sum of cross-entropies in nats, bytes predicted) of windows (micro_batch, context + 1)."""
    windows = windows.long()
    logits, targets = model(windows[:, :-1]), windows[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return loss, targets.numel()
