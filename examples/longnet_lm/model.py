"""A byte-level language model of LongNet blocks with RoPE. Nothing in it knows of ranks but the positions and the group."""

import torch
from torch import nn

from ringspan.longnet import LongNetBlock, geometric

WIDTH, HIDDEN, HEADS, LAYERS = 128, 256, 4, 2
SEGMENT, RATIO = 512, 4  # branches 512x1, 2048x4, 8192x16, ...: 512 keys at most per query, head and branch


def branches(context):
    return geometric(SEGMENT, RATIO, tokens=context)


class ByteModel(nn.Module):
    def __init__(self, context, group=None, sharding=None):
        super().__init__()
        b = branches(context)
        where = {} if group is None else {"group": group, "sharding": sharding}
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(
            LongNetBlock(WIDTH, HEADS, b.segment_lengths, b.dilation_rates, feedforward_dim=HIDDEN, bias=False, gamma_init=0.1, **where)
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)
        nn.init.normal_(self.embedding.weight)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens, labels, positions):
        """The loss of each token: (1, tokens)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions=positions)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def parameters_of(model):
    return sum(parameter.numel() for parameter in model.parameters())


def build(context, group=None, sharding=None, seed=1):
    """The same weights on every rank."""
    torch.manual_seed(seed)
    return ByteModel(context, group, sharding)
