"""A trained policy as a file that acts without this project: an ONNX model or a ``torch.export`` program."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from trainer.config import ConfigError
from trainer.evaluate import Agent
from trainer.files import write_atomically
from trainer.normalize import Scaling

FORMATS = (".onnx", ".pt2")


class DeployedPolicy(nn.Module):
    """Raw observations to the env's actions, the most likely ones: normalizer, networks and bounds in one module.

    ``forward(observations [batch, *observation_shape])`` returns ``actions [batch, *action_shape]``; with a recurrent
    core ``forward(observations, state [batch, state_size])`` returns them and the state that enters the next call.
    Every episode begins with a state of zeros.
    """

    def __init__(self, agent: Agent):
        super().__init__()
        self.policy, self.normalizer, self._action_map = agent.policy, agent.normalizer, agent.action_map
        if self.normalizer is not None:
            for name, statistic in self.normalizer.scaling()._asdict().items():
                self.register_buffer(name, statistic)

    def forward(self, observations: Tensor, state: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """Act on a batch."""
        if self.normalizer is not None:
            observations = self.normalizer(observations, Scaling(*map(self.get_buffer, Scaling._fields)))
        outputs = self.policy.outputs(observations, state)
        head = self.policy.head
        flat = head.distribution(outputs.policy_outputs, outputs.log_std).mode()
        actions = self._action_map(head.shaped(flat))
        return actions if state is None else (actions, outputs.state)


def export_policy(agent: Agent, observations: Tensor, path: Path, notes: dict[str, str]) -> None:
    """Write what an agent does, for batches of any size, in the format that the path's suffix names.

    Inputs are called ``observations`` and, with a recurrent core, ``state``, outputs ``actions`` and ``next_state``.

    Args:
        agent: on the CPU.
        observations: ``[2, *observation_shape]`` as the env gives them; only shape and dtype are taken over.
        path: ``*.onnx`` (needs the packages onnx and onnxscript) or ``*.pt2`` (for `torch.export.load`).
        notes: kept in the file, as metadata of the model or as extra files of the program.

    Raises:
        ConfigError: another suffix, or a package is missing.
        OSError: the file cannot be written; names it.
    """
    if path.suffix not in FORMATS:
        raise ConfigError(f"out={path}: the file must end in {' or '.join(FORMATS)}")
    inputs, names = [observations], ["observations"]
    if agent.policy.state_size:
        inputs, names = [observations, agent.policy.initial_state(len(observations))], ["observations", "state"]
    module, shapes = DeployedPolicy(agent).eval(), [{0: torch.export.Dim("batch")} for _ in inputs]
    with torch.no_grad(), _quiet():
        if path.suffix == ".pt2":
            program = torch.export.export(module, tuple(inputs), dynamic_shapes=shapes)
            return write_atomically(path, lambda file: torch.export.save(program, file, extra_files=notes))
        try:
            model = torch.onnx.export(
                module,
                tuple(inputs),
                input_names=names,
                output_names=["actions", "next_state"][: len(inputs)],
                dynamic_shapes=shapes,
                dynamo=True,
            )
        except ImportError as error:
            raise ConfigError(f"out={path}: it needs pip install -e '.[export]': {error}") from error
    if model is None:
        raise ConfigError(f"out={path}: torch.onnx.export gave no model")
    model.model.metadata_props.update(notes)
    return write_atomically(path, lambda file: file.write(model.model_proto.SerializeToString()))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporters print of their progress, of their own deprecations and of packages not needed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
