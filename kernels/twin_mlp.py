"""Two MLPs over the same inputs, evaluated together: an actor and a critic that share nothing but the observations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from kernels.backends import runs_triton
from kernels.operations import Backend, describe

Activation = Literal["elu", "relu", "tanh"]
Precision = Literal["bfloat16", "tf32", "float32"]
#: Weight ``[outputs, inputs]`` and bias ``[outputs]`` of a linear layer.
Linear = tuple[Tensor, Tensor]


class TwinOutputs(NamedTuple):
    """What `twin_mlp` returns."""

    first: Tensor  #: ``[B, outputs of the first network]`` float32
    second: Tensor  #: ``[B, outputs of the second network]`` float32


def twin_mlp(
    inputs: Tensor,
    first: Sequence[Linear],
    second: Sequence[Linear],
    *,
    activation: Activation = "elu",
    precision: Precision = "bfloat16",
    backend: Backend = "auto",
) -> TwinOutputs:
    """``h[l + 1] = activation(h[l] @ W[l].T + b[l])`` for two networks at once, the last layer without activation.

    Their hidden layers have equal widths, their outputs may differ. The fused backend launches each layer once for both
    networks, with bias and activation inside the matrix product, backward too; weight gradients are added in a fixed
    order, so that equal inputs give equal bits. ELU has a slope of ``exp(z)`` below 0.

    Args:
        inputs: ``[B, I]`` float32, contiguous rows; a constant, no gradient reaches it.
        first, second: the linear layers of each network, float32, contiguous.
        activation: ``elu``, ``relu`` or ``tanh``.
        precision: what products take, and what hidden layers are kept in. ``bfloat16``; ``tf32``: float32 with 10 bits
            behind the point, rounded where the kernels write it, cut off where it is given; ``float32``: all 24 bits, a
            factor as the sum of three bfloat16, of whose nine products the six are added that reach so far. Sums are
            float32.
        backend: ``triton`` (CUDA), ``torch`` (the two networks one after the other; float32 products are then as torch
            is set, whatever ``precision`` says of them), or ``auto`` (Triton on CUDA, else torch).

    Raises:
        TypeError: not a tensor or not a pair of them, or a dtype that is not float32.
        ValueError: shapes that do not chain, a weight or bias that is not contiguous, other hidden widths in the second
            network, an unknown choice, or a backend that cannot run here.
    """
    _check(inputs, first, second, activation, precision)
    if not runs_triton(backend, inputs.is_cuda) or not len(inputs):
        return TwinOutputs(*(_mlp(inputs.detach(), layers, activation, precision) for layers in (first, second)))
    parameters = [x for pair in zip(first, second, strict=True) for layer in pair for x in layer]
    one, two, *_ = torch.ops.rollscan.twin_mlp(inputs.detach(), parameters, activation, precision)
    return TwinOutputs(one, two)


def _mlp(inputs: Tensor, layers: Sequence[Linear], activation: Activation, precision: Precision) -> Tensor:
    activate = getattr(functional, activation) if activation != "tanh" else torch.tanh
    x = inputs
    with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        for weight, bias in layers[:-1]:
            x = activate(functional.linear(x, weight, bias))
        return functional.linear(x, *layers[-1]).float()


def _check(inputs: Tensor, first: Sequence[Linear], second: Sequence[Linear], activation: str, precision: str) -> None:
    for name, value, choices in (("activation", activation, Activation), ("precision", precision, Precision)):
        if value not in get_args(choices):
            raise ValueError(f"{name}: expected one of {', '.join(get_args(choices))}, got {value!r}")
    _check_kinds(inputs, first, second)
    if inputs.dim() != 2 or inputs.stride(1) != 1:
        raise ValueError(f"inputs: expected [B, I] with contiguous rows, got {describe(inputs)}")
    if len(first) != len(second) or not first:
        raise ValueError(f"second: expected as many layers as first, {len(first)} and at least 1, got {len(second)}")
    for name, layers in (("first", first), ("second", second)):
        width = inputs.shape[1]
        for index, (weight, bias) in enumerate(layers):
            if weight.dim() != 2 or weight.shape[1] != width or bias.shape != weight.shape[:1]:
                raise ValueError(
                    f"{name}[{index}]: expected a weight [outputs, {width}] and a bias [outputs], got "
                    f"{describe(weight)} and {describe(bias)}"
                )
            if not (weight.is_contiguous() and bias.is_contiguous()):
                raise ValueError(
                    f"{name}[{index}]: expected a contiguous weight and bias, got strides {weight.stride()} and "
                    f"{bias.stride()}"
                )
            width = len(bias)
    for index, ((weight, _), (other, _)) in enumerate(zip(first[:-1], second[:-1], strict=True)):
        if weight.shape != other.shape:
            raise ValueError(f"second[{index}]: expected {len(weight)} outputs as first, got {len(other)}")
    for x in (inputs, *(x for layers in (first, second) for layer in layers for x in layer)):
        if x.dtype != torch.float32 or x.device != inputs.device:
            raise TypeError(f"inputs and parameters: expected float32 on {inputs.device}, got {describe(x)}")


def _check_kinds(inputs: object, first: object, second: object) -> None:
    if not isinstance(inputs, Tensor):
        raise TypeError(f"inputs: expected a tensor [B, I], got {describe(inputs)}")
    for name, layers in (("first", first), ("second", second)):
        if not isinstance(layers, (list, tuple)):
            raise TypeError(f"{name}: expected a list of layers, (weight, bias) each, got {describe(layers)}")
        for index, layer in enumerate(layers):
            is_pair = isinstance(layer, (list, tuple)) and len(layer) == 2
            if not (is_pair and all(isinstance(x, Tensor) for x in layer)):
                raise TypeError(f"{name}[{index}]: expected tensors (weight, bias), got {describe(layer)}")


# --- operators ------------------------------------------------------------------------------------------------------

_OPTIONS = "Tensor[] parameters, str activation, str precision"


def _forward(inputs: Tensor, parameters: list[Tensor], activation: str, precision: str) -> tuple[Tensor, ...]:
    from kernels import triton_twin_launch  # here, so that the package imports where Triton is not installed

    return triton_twin_launch.forward(inputs, parameters, activation, precision)


def _backward(
    first: Tensor, second: Tensor, memory: Tensor, packed: Tensor, inputs: Tensor, parameters: list[Tensor],
    activation: str, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from kernels import triton_twin_launch

    return triton_twin_launch.backward((first, second), memory, packed, inputs, parameters, activation, precision)


def _fake_forward(inputs: Tensor, parameters: list[Tensor], activation: str, precision: str) -> tuple[Tensor, ...]:
    rows, hidden = len(inputs), sum(len(bias) for bias in parameters[1:-4:2])
    kept = torch.bfloat16 if precision == "bfloat16" else torch.float32
    dtype, parts = (torch.bfloat16, 3) if precision == "float32" else (kept, 1)
    weights = sum(weight.numel() for weight in parameters[::2])
    outputs = (inputs.new_empty(rows, len(bias)) for bias in (parameters[-3], parameters[-1]))
    return *outputs, inputs.new_empty(rows * hidden, dtype=kept), inputs.new_empty(2, parts, weights, dtype=dtype)


def _fake_backward(
    first: Tensor, second: Tensor, memory: Tensor, packed: Tensor, inputs: Tensor, parameters: list[Tensor],
    activation: str, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    hidden_biases = sum(x.numel() for x in parameters[1:-4:2])
    others = sum(x.numel() for x in parameters) - hidden_biases
    return inputs.new_empty(others), inputs.new_empty(hidden_biases)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, parameters, *ctx.options = inputs
    ctx.save_for_backward(*output[2:], x, *parameters)
    ctx.set_materialize_grads(False)  # what is kept for this has none: no zeros for it


def _differentiate(ctx: Any, first: Tensor | None, second: Tensor | None, *_: None) -> tuple[Any, ...]:
    memory, packed, inputs, *parameters = ctx.saved_tensors
    first, second = (
        inputs.new_zeros(len(inputs), len(bias)) if gradient is None else gradient
        for gradient, bias in ((first, parameters[-3]), (second, parameters[-1]))
    )
    others, hidden = torch.ops.rollscan.twin_mlp_backward(
        first, second, memory, packed, inputs, parameters, *ctx.options
    )  # fmt: skip
    *weights, last, other_last = others.split([x.numel() for x in (*parameters[::2], *parameters[-3::2])])
    biases = [*hidden.split([x.numel() for x in parameters[1:-4:2]]), last, other_last]
    flat = itertools.chain.from_iterable(zip(weights, biases, strict=True))
    gradients = [part.view_as(x) for part, x in zip(flat, parameters, strict=True)]
    return None, gradients, *[None] * len(ctx.options)


def _register(name: str, schema: str, run: Any, fake: Any) -> None:
    torch.library.define(name, schema)
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, fake)


_register(
    "rollscan::twin_mlp", f"(Tensor inputs, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)", _forward, _fake_forward
)
_register(
    "rollscan::twin_mlp_backward",
    f"(Tensor first, Tensor second, Tensor memory, Tensor packed, Tensor inputs, {_OPTIONS}) -> (Tensor, Tensor)",
    _backward,
    _fake_backward,
)
torch.library.register_autograd("rollscan::twin_mlp", _differentiate, setup_context=_save)
