"""ViT (arXiv 2010.11929) and DeepViT (arXiv 2103.11886) in the variant of the package vit-pytorch.

The package itself is not used: it imports torchvision, which is not available for every build of PyTorch. The variant differs
from the papers. Patches are normalised before and after their projection, the width of a head is free, and re-attention
normalises over the heads with LayerNorm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, width: int, heads: int, head_width: int, *, mixing: bool) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = head_width
        self.norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * heads * head_width, bias=False)
        self.project = nn.Linear(heads * head_width, width)
        self.mixing = nn.Parameter(torch.eye(heads)) if mixing else None
        self.mixing_norm = nn.LayerNorm(heads) if mixing else None

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        parts = self.query_key_value(self.norm(x)).reshape(batch, length, 3, self.heads, self.head_width)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-1, -2) * self.head_width**-0.5).softmax(-1)
        if self.mixing is not None and self.mixing_norm is not None:
            scores = torch.einsum("bhij,hg->bgij", scores, self.mixing)
            scores = self.mixing_norm(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.project((scores @ value).transpose(1, 2).reshape(batch, length, -1))


class VisionTransformer(nn.Module):  # type: ignore[misc]
    """Logits [batch, classes] of images [batch, 3, size, size]; with `mixing`, attention is re-attention."""

    def __init__(
        self, size: int, *, patch: int, width: int, heads: int, head_width: int, inner_width: int, depth: int, classes: int,
        mixing: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        if size % patch:
            raise ValueError(f"sides must be multiples of {patch} pixels")
        self.patch = patch
        numbers = 3 * patch * patch
        self.patches = nn.Sequential(nn.LayerNorm(numbers), nn.Linear(numbers, width), nn.LayerNorm(width))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList()
        for _ in range(depth):
            inner = (nn.LayerNorm(width), nn.Linear(width, inner_width), nn.GELU(), nn.Linear(inner_width, width))
            self.layers.append(_Attention(width, heads, head_width, mixing=mixing))
            self.layers.append(nn.Sequential(*inner))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, images: Any) -> Any:
        """See the class."""
        batch, channels, height, width = images.shape
        rows = height // self.patch
        columns = width // self.patch
        x = images.reshape(batch, channels, rows, self.patch, columns, self.patch).permute(0, 2, 4, 3, 5, 1)
        x = self.patches(x.reshape(batch, rows * columns, -1))
        x = torch.cat([self.cls_token.expand(batch, -1, -1), x], dim=1) + self.positions
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x[:, 0])
