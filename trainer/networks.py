"""Networks: torsos that turn observations into features, and the layers that they and the heads are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh}


def _orthogonal(layer: nn.Linear, gain: float) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, hidden_sizes: Sequence[int], outputs: int, activation: str, output_gain: float) -> nn.Sequential:
    """Orthogonally initialized linear layers (gain sqrt 2 inside, ``output_gain`` last) with an activation between
    them."""
    layers: list[nn.Module] = []
    for width in hidden_sizes:
        layers += [_orthogonal(nn.Linear(inputs, width), math.sqrt(2.0)), ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*layers, _orthogonal(nn.Linear(inputs, outputs), output_gain))


class Torso(nn.Module):
    """``[batch, *observation_shape] -> [batch, features]``."""

    features: int  #: the width of the output


class VectorTorso(Torso):
    """Numbers of any shape and dtype as one float32 vector; nothing is learned, so heads over it share nothing."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.features = math.prod(shape)

    def forward(self, observations: Tensor) -> Tensor:
        """``[batch, *shape]`` to ``[batch, features]`` float32."""
        return observations.flatten(1).float()


class PixelTorso(Torso):
    """Convolutions over ``[batch, channels, height, width]`` uint8 frames, then a linear layer with ReLU.

    Frames are scaled to 0 .. 1 here, on the device, so that a rollout keeps bytes. Under autocast they go straight to
    its dtype, which holds 0 .. 255 exactly.

    Raises:
        ValueError: the frames are too small for the convolutions.
    """

    def __init__(self, shape: tuple[int, ...], convolutions: nn.Module, features: int):
        super().__init__()
        self.features, self.convolutions = features, convolutions
        self.set_layout(torch.channels_last)
        try:
            with torch.no_grad():
                flat = convolutions(torch.zeros(1, *shape)).numel()
        except RuntimeError as error:
            raise ValueError(f"frames of shape {shape} (channels, height, width) are too small") from error
        self.linear = _orthogonal(nn.Linear(flat, features), math.sqrt(2.0))

    def set_layout(self, layout: torch.memory_format) -> None:
        """How the convolutions lie in memory, and what frames are brought into; it changes no result."""
        self._layout = layout
        self.convolutions.to(memory_format=layout)  # pyright: ignore[reportCallIssue]

    def forward(self, observations: Tensor) -> Tensor:
        """``[batch, channels, height, width]`` uint8 to ``[batch, features]``."""
        device = observations.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        frames = observations.to(dtype, memory_format=self._layout) * (1.0 / 255.0)
        return self.linear(self.convolutions(frames).relu().flatten(1)).relu()


class NatureCNN(PixelTorso):
    """Three convolutions and 512 features (Mnih et al. 2015, doi 10.1038/nature14236, methods); orthogonal, gain
    sqrt 2."""

    def __init__(self, shape: tuple[int, ...]):
        convolutions = nn.Sequential(
            nn.Conv2d(shape[0], 32, kernel_size=8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, kernel_size=3),
        )
        for layer in convolutions:
            if isinstance(layer, nn.Conv2d):
                nn.init.orthogonal_(layer.weight, math.sqrt(2.0))
                nn.init.zeros_(layer.bias)  # pyright: ignore[reportArgumentType]
        super().__init__(shape, convolutions, features=512)


class _ResidualBlock(nn.Module):
    """``x + conv(relu(conv(relu(x))))``."""

    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, kernel_size=3, padding=1)
        self.second = nn.Conv2d(channels, channels, kernel_size=3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.second(self.first(inputs.relu()).relu())


class ImpalaResNet(PixelTorso):
    """Fifteen convolutions in three stages of 16, 32 and 32 channels, and 256 features (Espeholt et al. 2018, arXiv
    1802.01561, figure 3, right, without the LSTM); convolutions are initialized as torch does."""

    def __init__(self, shape: tuple[int, ...]):
        stages: list[nn.Module] = []
        inputs = shape[0]
        for channels in (16, 32, 32):
            stages += [
                nn.Conv2d(inputs, channels, kernel_size=3, padding=1),
                nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
                _ResidualBlock(channels),
                _ResidualBlock(channels),
            ]
            inputs = channels
        super().__init__(shape, nn.Sequential(*stages), features=256)


PIXEL_TORSOS: dict[str, type[NatureCNN] | type[ImpalaResNet]] = {
    "nature_cnn": NatureCNN,
    "impala_resnet": ImpalaResNet,
}
