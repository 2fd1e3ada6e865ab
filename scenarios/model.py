"""A small decoder-only transformer as one function of its weights.

x = E[tokens] + P;  x = x + attend(norm(x));  x = x + mlp(norm(x));  logits = s * norm(x) E^T.

Pre-norm blocks after Radford et al. (2019); the output layer shares the embedding (Press and Wolf,
2017). Widths are deliberately odd: 74 and 37 are multiples of no vector width, and `logit_scale`
has a single element, so tails, gaps and tiny tensors occur in every step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from twinstep.scenarios.text import VOCABULARY

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model.

    Attributes:
        experts: that share the tokens of a layer out by the byte's value, in equal ranges; 0 has
            one network for all tokens.
    """

    context: int = 64
    width: int = 74
    heads: int = 2
    layers: int = 2
    experts: int = 0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width={self.width}, but should be a multiple of heads={self.heads} [Shape]"
            )


def sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every weight's name and size, in the order in which all lists hold them."""
    d = shape.width
    block: dict[str, tuple[int, ...]] = {
        "norm1.gain": (d,),
        "norm1.bias": (d,),
        "attend.qkv": (3 * d, d),
        "attend.qkv_bias": (3 * d,),
        "attend.out": (d, d),
        "attend.out_bias": (d,),
        "norm2.gain": (d,),
        "norm2.bias": (d,),
    }
    for mlp in mlps(shape):
        block |= {
            f"{mlp}.up": (4 * d, d),
            f"{mlp}.up_bias": (4 * d,),
            f"{mlp}.down": (d, 4 * d),
            f"{mlp}.down_bias": (d,),
        }
    result: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, d), "position": (shape.context, d)}
    for layer in range(shape.layers):
        result |= {f"block{layer}.{name}": size for name, size in block.items()}
    return result | {"norm.gain": (d,), "norm.bias": (d,), "logit_scale": (1,)}


def mlps(shape: Shape) -> list[str]:
    """Names of the networks of a layer: one, or the experts."""
    return [f"expert{number}.mlp" for number in range(shape.experts)] or ["mlp"]


def initial_weights(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw fp32 weights: gains and `logit_scale` one, biases zero, the rest normal.

    The standard deviation is 0.05, divided by sqrt(2 * layers) where a matrix writes into the
    residual stream (Radford et al., 2019).
    """
    weights: dict[str, Tensor] = {}
    for name, size in sizes(shape).items():
        if name.endswith(("gain", "logit_scale")):
            weights[name] = torch.ones(size)
        elif name.endswith("bias"):
            weights[name] = torch.zeros(size)
        else:
            residual = name.endswith(("attend.out", "mlp.down"))
            deviation = 0.05 / math.sqrt(2 * shape.layers) if residual else 0.05
            weights[name] = torch.randn(size, generator=generator) * deviation
    return weights


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply as matrix units do: x weight^T + bias, summed in fp32, rounded once to x's dtype.

    The gradients of x, weight and bias are rounded to the dtype of what they belong to, so in fp16
    a large loss scale overflows here. (torch's own fp16 product on the CPU is 20 times slower.)
    """
    wide_bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)


def attend(x: Tensor, weights: Weights, prefix: str, heads: int) -> Tensor:
    """Causal self-attention; x has shape (batch, time, width).

    The softmax runs in fp32: in fp16 a row of 64 probabilities loses most of its gradient.
    """
    size, time, width = x.shape
    qkv = linear(x, weights[f"{prefix}.qkv"], weights[f"{prefix}.qkv_bias"])
    q, k, v = (
        part.reshape(size, time, heads, width // heads).transpose(1, 2)
        for part in qkv.chunk(3, dim=-1)
    )
    score = (q.float() @ k.float().transpose(-1, -2)) / math.sqrt(width // heads)
    future = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
    share = score.masked_fill(future, -math.inf).softmax(-1).to(x.dtype)
    joined = (share.float() @ v.float()).to(x.dtype).transpose(1, 2).reshape(size, time, width)
    return linear(joined, weights[f"{prefix}.out"], weights[f"{prefix}.out_bias"])


def block(x: Tensor, weights: Weights, prefix: str, shape: Shape, inputs: Tensor) -> Tensor:
    """One transformer block; returns a tensor of x's shape and dtype."""
    width = (x.shape[-1],)
    h = F.layer_norm(x, width, weights[f"{prefix}.norm1.gain"], weights[f"{prefix}.norm1.bias"])
    x = x + attend(h, weights, f"{prefix}.attend", shape.heads)
    h = F.layer_norm(x, width, weights[f"{prefix}.norm2.gain"], weights[f"{prefix}.norm2.bias"])
    if not shape.experts:
        return x + mlp(h, weights, f"{prefix}.mlp")
    chosen = inputs * shape.experts // VOCABULARY
    for number, name in enumerate(mlps(shape)):
        of_expert = mlp(h, weights, f"{prefix}.{name}")
        x = x + of_expert.masked_fill((chosen != number).unsqueeze(-1), 0.0)
    return x


def mlp(h: Tensor, weights: Weights, prefix: str) -> Tensor:
    """The network of a layer, or one expert of it."""
    h = F.gelu(linear(h, weights[f"{prefix}.up"], weights[f"{prefix}.up_bias"]))
    return linear(h, weights[f"{prefix}.down"], weights[f"{prefix}.down_bias"])


def logits(shape: Shape, weights: Weights, inputs: Tensor) -> Tensor:
    """Unnormalised log-probabilities of the next byte.

    Args:
        shape: sizes of the model.
        weights: one tensor per name of `sizes`, all of one dtype, in which every layer's result
            is stored.
        inputs: int64, shape (batch, time), time <= context.

    Returns:
        Shape (batch, time, 256), the weights' dtype.
    """
    x = F.embedding(inputs, weights["embed"]) + weights["position"][: inputs.shape[1]]
    for layer in range(shape.layers):
        x = block(x, weights, f"block{layer}", shape, inputs)
    x = F.layer_norm(x, (shape.width,), weights["norm.gain"], weights["norm.bias"])
    return linear(x, weights["embed"]) * weights["logit_scale"]


def loss(shape: Shape, weights: Weights, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats.

    Args:
        shape: sizes of the model.
        weights: as in `logits`.
        inputs: int64, shape (batch, time).
        targets: int64, shape (batch, time).

    Returns:
        fp32, shape (). Weights that are not finite give NaN.
    """
    found = logits(shape, weights, inputs)
    return F.cross_entropy(found.float().flatten(0, 1), targets.flatten())
