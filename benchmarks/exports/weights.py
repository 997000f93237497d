"""Seeded weights that make every output depend on every input.

Default initialisation is useless for comparisons: outputs can be all zero, or almost independent of the input. So weights are
drawn to keep activations near unit variance, with fan-in scaling for every matrix (He et al., ICCV 2015). No bias or scale
stays at 0 or 1, where a kernel that omits it would go unnoticed. Recipes contain the additional corrections for one
architecture.
"""

from __future__ import annotations

import math
from typing import Any


def initialise(torch: Any, network: Any) -> None:
    """Draw every trainable weight; constant tables such as Whisper's sinusoids do not change."""
    nn = torch.nn
    convolutions = (nn.Conv1d, nn.Conv2d)
    transposed = nn.ConvTranspose2d
    norms = (nn.LayerNorm, nn.BatchNorm2d, nn.GroupNorm)
    drawn: set[int] = set()
    for module in network.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
            continue
        drawn.add(id(weight))
        if isinstance(module, (*convolutions, transposed, nn.Linear)):
            fan_in = weight[0].numel()
            if isinstance(module, transposed):  # [input, output, ...]; outputs do not overlap
                fan_in = weight[:, 0].numel() // math.prod(module.stride)
            gain = 1.0 if isinstance(module, nn.Linear) else math.sqrt(2.0)
            nn.init.normal_(weight, std=gain / math.sqrt(fan_in))
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(weight, std=0.5)
        elif isinstance(module, norms) or weight.dim() == 1:  # some libraries have their own normalisation classes
            nn.init.normal_(weight, mean=1.0, std=0.1)
        if isinstance(getattr(module, "bias", None), nn.Parameter):  # GPT-Neo calls its causal mask `bias`
            drawn.add(id(module.bias))
            nn.init.normal_(module.bias, std=0.1)
    for parameter in network.parameters():
        if id(parameter) in drawn or not parameter.requires_grad:
            continue
        if parameter.dim() == 1:  # the scale of a residual branch
            nn.init.normal_(parameter, mean=1.0, std=0.1)
        else:  # learned tokens and positions
            nn.init.normal_(parameter, std=0.5)


def standardise_batches(torch: Any, network: Any, image: Any) -> Any:
    """Compute the statistics of batch normalisation over variations of an image and noise; those images."""
    variations = image.roll(7, -1) * torch.linspace(0.5, 1.5, 4).reshape(4, 1, 1, 1) + torch.randn(4, 3, 1, 1)
    batch = torch.cat([variations, torch.randn(4, *image.shape[1:])])
    norms = [module for module in network.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for module in norms:
        module.momentum = None  # the plain average over all batches
        module.reset_running_stats()
    if norms:
        network.train()
        network(batch)
        network.eval()
    return batch
