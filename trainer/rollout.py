"""The rollout: named ``[T, N]`` tensors on the device, allocated once and written in place."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from trainer.normalize import Scaling

_NOT_ROWS = ("columns", "scaling")  #: fields of a rollout that have no axes [T, N]


@dataclass
class Rollout:
    """``T`` steps of ``N`` envs, time first; see `envs.base` for what a row means.

    ``observations`` and ``values`` carry one row more than the others: row ``T`` is what the policy sees after the
    last step, so that ``values[1:]`` is V of the successor of every row.
    """

    observations: Tensor  #: ``[T + 1, N, *observation_shape]``, raw until `Collector.collect` normalizes them
    actions: Tensor  #: ``[T, N, *action_shape]``, raw: before they are mapped into the env's bounds
    log_probs: Tensor  #: ``[T, N]`` float32, of ``actions`` under the behaviour policy
    values: Tensor  #: ``[T + 1, N]`` float32, in units of the reward
    rewards: Tensor  #: ``[T, N]`` float32, as the env gave them
    terminated: Tensor  #: ``[T, N]`` bool
    truncated: Tensor  #: ``[T, N]`` bool
    valid: Tensor  #: ``[T, N]`` bool, False in filler rows
    core_state: Tensor  #: ``[1, N, state_size]`` float32, the memory with which the policy saw row 0
    columns: slice = field(default_factory=lambda: slice(None))  #: which of the run's envs these are
    #: ``[N, *observation_shape]`` each: with which the policy saw observations that are still raw
    scaling: Scaling | None = None

    @classmethod
    def allocate(
        cls,
        length: int,
        num_envs: int,
        observation_shape: tuple[int, ...],
        observation_dtype: torch.dtype,
        action_shape: tuple[int, ...],
        action_dtype: torch.dtype,
        device: torch.device,
        state_size: int = 0,
    ) -> Rollout:
        """Zeroed tensors for ``length`` steps of ``num_envs`` envs, for a policy with so many numbers of memory."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            observations=zeros(length + 1, num_envs, *observation_shape, dtype=observation_dtype),
            actions=zeros(length, num_envs, *action_shape, dtype=action_dtype),
            log_probs=zeros(length, num_envs),
            values=zeros(length + 1, num_envs),
            rewards=zeros(length, num_envs),
            terminated=zeros(length, num_envs, dtype=torch.bool),
            truncated=zeros(length, num_envs, dtype=torch.bool),
            valid=zeros(length, num_envs, dtype=torch.bool),
            core_state=zeros(1, num_envs, state_size),
        )

    def for_envs(self, num_envs: int) -> Rollout:
        """Zeroed tensors of the same kinds for another number of envs."""
        return self.allocate(
            self.length, num_envs, tuple(self.observations.shape[2:]), self.observations.dtype,
            tuple(self.actions.shape[2:]), self.actions.dtype, self.valid.device, self.core_state.shape[-1],
        )  # fmt: skip

    @property
    def length(self) -> int:
        """T."""
        return self.rewards.shape[0]

    @property
    def last_value(self) -> Tensor:
        """``[N]``, V of the observation after the last row."""
        return self.values[-1]

    def narrow(self, columns: slice) -> Rollout:
        """A view of some columns."""
        tensors = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _NOT_ROWS}
        views: dict[str, Any] = {name: tensor[:, columns] for name, tensor in tensors.items()}
        scaling = self.scaling and Scaling(*(tensor[columns] for tensor in self.scaling))
        return replace(self, **views, columns=columns, scaling=scaling)

    def read_rows(self) -> Tensor:
        """``[T + 1, N]`` bool: the observations that an update reads, because the row is valid or because the row
        before bootstraps from it."""
        none = torch.zeros_like(self.valid[:1])
        return torch.cat([self.valid, none]) | torch.cat([none, self.valid & ~self.terminated])

    def clear_unread_(self) -> None:
        """Zero what a network or a distribution reads of rows that count nowhere: a selected-away loss still has a
        gradient, and 0 times a NaN input is NaN. Final observations that a truncated row bootstraps from stay."""
        _clear_(self.observations, ~self.read_rows())
        for tensor in (self.actions, self.log_probs):
            _clear_(tensor, ~self.valid)


def _clear_(tensor: Tensor, rows: Tensor) -> None:
    """Zero these rows ``[T, N]`` of a tensor ``[T, N, ...]``."""
    tensor.masked_fill_(rows.view(*rows.shape, *(1,) * (tensor.dim() - 2)), 0)


def first_non_finite_row(rollout: Rollout) -> str | None:
    """Name the first row that an update read and that holds a NaN or an infinity, e.g. ``rewards of env 3 is nan at
    row 5``; synchronizes."""
    read = rollout.read_rows()
    for name in ("observations", "rewards", "values", "log_probs", "actions"):
        tensor = getattr(rollout, name)
        if not tensor.is_floating_point():
            continue
        bad = ~torch.isfinite(tensor.flatten(2)).all(-1) if tensor.dim() > 2 else ~torch.isfinite(tensor)
        rows = (bad & (read if len(bad) > rollout.length else rollout.valid)).nonzero()
        if len(rows):
            row, env = rows[0].tolist()
            entries = tensor[row, env].flatten()
            value = entries[~torch.isfinite(entries)][0].item()
            return f"{name} of env {env + (rollout.columns.start or 0)} is {value} at row {row} of the rollout"
    return None
