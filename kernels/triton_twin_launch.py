"""Launching the layers of two MLPs: tiles, memory of the hidden layers, and the order of the steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kernels.operations import describe
from kernels.triton_call import Launch, run
from kernels.triton_tiles import next_power
from kernels.triton_twin import input_gradient_kernel, layer_kernel, pack_kernel, weight_gradient_kernel

INTERPRETED = isinstance(layer_kernel, InterpretedFunction)
Pair = tuple[Any, Any]


class Layer(NamedTuple):
    """One layer of both networks."""

    inputs: int
    part_size: int  #: from one part of a weight to the next
    outputs: tuple[int, int]  #: equal but in the last layer
    weights: Pair  #: as products take them, ``[outputs, inputs]``
    turned: Pair  #: the same as ``[inputs, outputs]``
    biases: Pair


class Tile(NamedTuple):
    """The largest tile of a kernel, by the axes of its result and the one that it sums over."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int
    products: str = "ieee"  #: Triton's name of how float32 is multiplied; ``parts``: taken apart by the kernel

    def fit(self, rows: int, columns: int, depth: int) -> Tile:
        """No larger than the result, and at least the 16 on a side that a matrix instruction takes."""

        def side(largest: int, size: int) -> int:
            return max(16, min(largest, next_power(size)))

        return self._replace(
            rows=side(self.rows, rows), columns=side(self.columns, columns), step=side(self.step, depth)
        )


class Format(NamedTuple):
    """What hidden layers are kept in, and the tiles of the three kernels."""

    dtype: torch.dtype
    layer: Tile
    input_gradient: Tile
    weight_gradient: Tile

    @property
    def parts(self) -> int:
        """How many bfloat16 stand for a weight; 1 where it is one number of the products' dtype."""
        return 3 if self.layer.products == "parts" else 1


#: Rows of a weight gradient's tile of tf32 are few, so that it is no warp group's: that would want both operands
#: turned.
FORMATS = {
    "bfloat16": Format(torch.bfloat16, Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 4, 3), Tile(128, 128, 64, 8, 2)),
    "tf32": Format(
        torch.float32, Tile(64, 128, 32, 4, 3, "tf32"), Tile(64, 128, 32, 4, 3, "tf32"),
        Tile(32, 256, 32, 4, 3, "tf32"),
    ),
    "float32": Format(
        torch.float32, Tile(128, 64, 32, 8, 3, "parts"), Tile(64, 64, 32, 4, 3, "parts"),
        Tile(128, 64, 32, 8, 3, "bf16x6"),
    ),
}  # fmt: skip
_PACK_SIDE = 32


def forward(
    inputs: Tensor, parameters: Sequence[Tensor], activation: str, precision: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs of both networks, the memory of their hidden layers, and their packed weights.

    Raises:
        ValueError: not on CUDA.
    """
    if not (inputs.is_cuda or INTERPRETED):
        raise ValueError(
            f"backend: 'triton' needs CUDA tensors, got inputs of {describe(inputs)}; use 'torch' or 'auto'"
        )
    format = FORMATS[precision]
    packed, packing = pack(parameters, format)
    results, launches = forward_launches(inputs, layers_of(parameters, packed), activation, format)
    run([packing, *launches], inputs.device)
    return *results, packed


def backward(
    gradients: Pair, memory: Tensor, packed: Tensor, inputs: Tensor, parameters: Sequence[Tensor], activation: str,
    precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients in two flat tensors, in the order of the parameters: of the weights and, after them, the biases of the
    last layer; and of the other biases."""
    gradients = gradients[0].contiguous(), gradients[1].contiguous()
    layers = layers_of(parameters, packed)
    parts, launches = backward_launches(gradients, inputs, layers, memory, activation, FORMATS[precision])
    run(launches, inputs.device)
    return parts[0].sum(0), parts[1].sum(0)


def pack(parameters: Sequence[Tensor], format: Format) -> tuple[Tensor, Launch]:
    """All weights as products take them, ``[2, parts, weights]``, once as they are and once turned, and what fills it:
    every tile of rows reads them anew."""
    weights = parameters[::2]
    sizes = [w.numel() for w in weights]
    dtype = torch.bfloat16 if format.parts > 1 else format.dtype
    packed = weights[0].new_empty(2, format.parts, sum(sizes), dtype=dtype)
    starts = _starts(sizes)[:-1]
    widths, depths = zip(*(w.shape for w in weights), strict=True)
    tiles = max(-(-n // _PACK_SIDE) * -(-k // _PACK_SIDE) for n, k in zip(widths, depths, strict=True))
    constants = {
        "COUNT": len(weights),
        "PARTS": format.parts,
        "ROUND": format.layer.products == "tf32",
        "SIDE": _PACK_SIDE,
    }
    arguments = (tuple(weights), *packed.unbind(), sum(sizes), starts, tuple(widths), tuple(depths))
    return packed, Launch(pack_kernel, (tiles, len(weights)), arguments, constants)


def layers_of(parameters: Sequence[Tensor], packed: Tensor) -> list[Layer]:
    """``parameters``: weight and bias of the first network's layer, then the second's, layer by layer; ``packed``: of
    `pack`."""
    biases, shapes = parameters[1::2], [w.shape for w in parameters[::2]]
    parts = packed[:, 0].split([n * k for n, k in shapes], dim=1)
    weights = [part[0].view(n, k) for part, (n, k) in zip(parts, shapes, strict=True)]
    turned = [part[1].view(k, n) for part, (n, k) in zip(parts, shapes, strict=True)]
    pairs = [zip(tensors[::2], tensors[1::2], strict=True) for tensors in (weights, turned, biases)]
    return [
        Layer(weight[0].shape[1], packed.shape[2], (len(weight[0]), len(weight[1])), weight, other, bias)
        for weight, other, bias in zip(*pairs, strict=True)
    ]


def hidden_of(memory: Tensor, layers: list[Layer], rows: int) -> list[Pair]:
    """The hidden layers of both networks in one flat memory, ``[rows, width]`` each."""
    widths = [layer.outputs[0] for layer in layers[:-1]]
    return [(part[0], part[1]) for part in (x.view(2, rows, -1) for x in memory.split([2 * rows * w for w in widths]))]


def forward_launches(
    inputs: Tensor, layers: list[Layer], activation: str, format: Format
) -> tuple[tuple[Tensor, Tensor, Tensor], list[Launch]]:
    """Outputs of both networks (float32) and the memory of their hidden layers, and what fills them."""
    rows = len(inputs)
    memory = inputs.new_empty(2 * rows * sum(layer.outputs[0] for layer in layers[:-1]), dtype=format.dtype)
    first, second = (inputs.new_empty(rows, width, dtype=torch.float32) for width in layers[-1].outputs)
    values = [(inputs, inputs), *hidden_of(memory, layers, rows), (first, second)]
    launches = []
    for layer, (below, above) in zip(layers, itertools.pairwise(values), strict=True):
        widest = max(layer.outputs)
        tile = format.layer.fit(rows, widest, layer.inputs)
        arguments = (below, layer.weights, layer.part_size, layer.biases, above, layer.outputs, rows, layer.outputs)
        constants = {
            "INPUT_STRIDE": below[0].stride(0), "K": layer.inputs,
            "ACTIVATION": "none" if layer is layers[-1] else activation,
            **_constants(format, tile),
        }  # fmt: skip
        launches.append(Launch(layer_kernel, _grid(tile, rows, widest), arguments, constants))
    return (first, second, memory), launches


def backward_launches(
    gradients: Pair, inputs: Tensor, layers: list[Layer], memory: Tensor, activation: str, format: Format
) -> tuple[Pair, list[Launch]]:
    """Parts of what `backward` returns, one in a row, and what fills them."""
    rows = len(inputs)
    values = [(inputs, inputs), *hidden_of(memory, layers, rows)]
    below = hidden_of(torch.empty_like(memory), layers, rows)
    starts = _starts([*(w.numel() for layer in layers for w in layer.weights), *layers[-1].outputs])
    bias_starts = _starts([width for layer in layers[:-1] for width in layer.outputs])
    parts = inputs.new_empty(-(-rows // rows_of_part(rows)), starts[-1], dtype=torch.float32)
    blocks = -(-rows // format.input_gradient.fit(rows, 1, 1).rows)
    bias_parts = inputs.new_empty(blocks, bias_starts[-1], dtype=torch.float32)
    launches = []
    for index in reversed(range(len(layers))):
        layer = layers[index]
        arguments = (layer, gradients, (gradients[0].stride(0), gradients[1].stride(0)), values[index])
        places = (*starts[2 * index : 2 * index + 2], *starts[-3:-1])
        launches.append(_weight_gradient(*arguments, parts, places, rows, format, with_bias=layer is layers[-1]))
        if index:
            gradients, place = below[index - 1], bias_starts[2 * index - 2 : 2 * index]
            launches.append(_input_gradient(*arguments, gradients, bias_parts, place, rows, activation, format))
    return (parts, bias_parts), launches


def _starts(sizes: list[int]) -> tuple[int, ...]:
    """Where parts of these sizes begin, and where the last one ends."""
    return tuple(itertools.accumulate(sizes, initial=0))


def _weight_gradient(
    layer: Layer, gradients: Pair, strides: Pair, values: Pair, parts: Tensor, places: tuple[int, ...], rows: int,
    format: Format, with_bias: bool,
) -> Launch:  # fmt: skip
    widest = max(layer.outputs)
    tile = format.weight_gradient.fit(widest, layer.inputs, rows)
    arguments = (
        gradients, strides, values, parts, parts.shape[1], places[:2], places[2:], rows, layer.outputs,
        rows_of_part(rows),
    )  # fmt: skip
    constants = {
        "INPUT_STRIDE": values[0].stride(0), "K": layer.inputs, "WITH_BIAS": with_bias, **_constants(format, tile),
    }  # fmt: skip
    outputs, inputs, networks = _grid(tile, widest, layer.inputs)
    return Launch(weight_gradient_kernel, (outputs * inputs, len(parts), networks), arguments, constants)


def _input_gradient(
    layer: Layer, gradients: Pair, strides: Pair, values: Pair, below: Pair, bias_parts: Tensor,
    places: tuple[int, ...], rows: int, activation: str, format: Format,
) -> Launch:  # fmt: skip
    widest = max(layer.outputs)
    tile = format.input_gradient.fit(rows, layer.inputs, widest)
    arguments = (
        gradients, strides, layer.turned, layer.part_size, values, below, bias_parts, bias_parts.shape[1], places,
        rows, layer.outputs,
    )  # fmt: skip
    constants = {"K": layer.inputs, "ACTIVATION": activation, "MAX_N": widest, **_constants(format, tile)}
    return Launch(input_gradient_kernel, _grid(tile, rows, layer.inputs), arguments, constants)


def rows_of_part(rows: int) -> int:
    """Rows whose products one program of a weight gradient adds up: some 32 to 64 parts fill a GPU, and each costs a
    row of memory as long as all parameters."""
    return min(1024, max(256, next_power(-(-rows // 64))))


def _grid(tile: Tile, rows: int, columns: int) -> tuple[int, int, int]:
    return -(-rows // tile.rows), -(-columns // tile.columns), 2


def _constants(format: Format, tile: Tile) -> dict[str, Any]:
    # the interpreter multiplies float32 as it is, under no other name, and takes bfloat16 for integers
    products = "ieee" if INTERPRETED and tile.products == "bf16x6" else tile.products
    is_short = not INTERPRETED and (format.dtype == torch.bfloat16 or tile.products == "parts")
    return {
        "DOT": tl.bfloat16 if is_short else tl.float32, "PRECISION": products, "ROWS": tile.rows,
        "COLUMNS": tile.columns, "STEP": tile.step, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
