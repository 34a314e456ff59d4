"""The usual layers from their formulas in NumPy, with the weights of a model, which tests compare with its outputs."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def scrambled(model):
    """Return a model in eval mode and double precision with large random weights, and these weights by name."""
    model = model.double().eval()
    for name, parameter in model.named_parameters():
        if ".log_" not in name:  # the eigenvalues of LRURec must stay below 1
            nn.init.normal_(parameter, std=0.5)
    return model, {name: value.detach().numpy() for name, value in model.named_parameters()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def layer_norm(x, weights=None, name="", eps=1e-5):
    """Normalise each row; with `name`, apply the gain and the shift of that layer."""
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"] if name else scaled


def attention(x, weights, name, heads, sees=lambda query: slice(query + 1)):
    """Return attention with one head after the other; `sees` gives the keys of a query, by default the past."""
    query, key, value = (linear(x, weights, f"{name}.to_{part}") for part in ("query", "key", "value"))
    width, mixed = x.shape[1] // heads, np.zeros_like(x)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(len(x)):
            seen = sees(i)
            mixed[i, part] = softmax(key[seen, part] @ query[i, part] / np.sqrt(width)) @ value[seen, part]
    return linear(mixed, weights, f"{name}.to_out")


def torch_layer(block):
    """Return a layer of torch's own with the weights of a `Block` of bert4rec.py."""
    mine = block.attention
    width = mine.to_out.in_features
    layer = nn.TransformerEncoderLayer(width, mine.heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
    parts = (mine.to_query, mine.to_key, mine.to_value)
    weights = {
        "self_attn.in_proj_weight": torch.cat([part.weight for part in parts]),
        "self_attn.in_proj_bias": torch.cat([part.bias for part in parts]),
    }
    pairs = {
        "self_attn.out_proj": mine.to_out,
        "linear1": block.inner,
        "linear2": block.outer,
        "norm1": block.norm_attention,
        "norm2": block.norm,
    }
    for name, part in pairs.items():
        weights |= {f"{name}.{kind}": value for kind, value in part.state_dict().items()}
    layer.load_state_dict(weights)
    return layer.train()  # in eval mode torch takes another path, with the same result


def stream(part, x, *, causal=True):
    """Return the outputs of `part` for the embedded history x (L, D): positions, a normalisation, blocks of torch."""
    x = F.layer_norm(x + part.positions[-len(x) :], x.shape[-1:], part.norm.weight, part.norm.bias)[None]
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if causal else None
    for block in part.blocks:
        x = torch_layer(block)(x, src_mask=mask)
    return x[0]
