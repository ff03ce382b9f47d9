"""Checkpoints: one file each, written whole or not at all, loaded without running code from them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.files import write_atomically

#: Raised when the content of a checkpoint changes in a way that older code could not read.
FORMAT = 1
_KEPT = 2
_NAME = re.compile(r"update-(\d+)\.pt")


class CheckpointError(RuntimeError):
    """A checkpoint is missing, torn, or of another network; the message is one line that names the file or tensor."""


def _update_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else -1


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first."""
    return sorted((p for p in folder.glob("update-*.pt") if _update_of(p) >= 0), key=_update_of, reverse=True)


def save(folder: Path, update: int, state: dict[str, Any]) -> Path:
    """Write ``update-<update>.pt`` and remove all but it and the one before.

    Args:
        folder: the run's ``checkpoints`` folder; made if missing.
        update: how many updates the state has seen.
        state: nested dictionaries and lists of tensors, numbers, strings and None.

    Raises:
        CheckpointError: the file could not be written (a full disk, say); what was there before is untouched.
    """
    path = folder / f"update-{update:08d}.pt"
    try:
        write_atomically(path, lambda file: torch.save({"format": FORMAT, "update": update, **state}, file))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: could not be written: {_reason(error)}") from error
    kept = [other for other in list_checkpoints(folder) if _update_of(other) <= update][:_KEPT]
    for other in set(list_checkpoints(folder)) - set(kept):  # older ones, and later ones that the run went back from
        other.unlink(missing_ok=True)
    for leftover in folder.glob(".update-*"):  # of a process that was killed while it wrote
        leftover.unlink(missing_ok=True)
    return path


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read one checkpoint onto a device; nothing in the file is executed.

    Raises:
        CheckpointError: the file is missing, torn, refused, or of another format.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch reports damage as RuntimeError, EOFError, UnpicklingError, BadZipFile, ...
        raise CheckpointError(f"{path}: not a readable checkpoint: {_reason(error)}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path}: checkpoint format {found}, this version reads {FORMAT}")
    return state


def load_newest(folder: Path, notice: Callable[[str], None], device: torch.device | str = "cpu") -> dict[str, Any]:
    """The newest checkpoint of a folder that is whole; a torn one is named and the one before it taken.

    Raises:
        CheckpointError: there is none, or none is whole.
    """
    paths = list_checkpoints(folder)
    if not paths:
        raise CheckpointError(f"{folder}: holds no checkpoint (update-<n>.pt)")
    errors = []
    for path in paths:
        try:
            return load(path, device)
        except CheckpointError as error:
            errors.append(str(error))
            if path != paths[-1]:
                notice(f"{error}; trying the one before")
    raise CheckpointError(errors[0])


def load_module(module: torch.nn.Module, state: dict[str, Any], where: str) -> None:
    """Load weights, naming the first tensor that does not fit.

    Raises:
        CheckpointError: a tensor is missing, unknown, or of another shape.
    """
    own = module.state_dict()
    for name, tensor in own.items():
        if name not in state:
            raise CheckpointError(f"{where}: the checkpoint has no tensor {name}; was the network or the env changed?")
        if state[name].shape != tensor.shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {tuple(state[name].shape)} in the checkpoint and "
                f"{tuple(tensor.shape)} in this configuration; was the network or the env changed?"
            )
    unknown = sorted(set(state) - set(own))
    if unknown:
        raise CheckpointError(
            f"{where}: this configuration has no tensor {unknown[0]}; was the network or the env changed?"
        )
    module.load_state_dict(state)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The random generators that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore what `rng_state` gave; a run that moved from CPU to CUDA keeps the fresh CUDA generator."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def _reason(error: BaseException) -> str:
    if isinstance(error.__context__, OSError):  # torch's writer complains of what it has counted, not of the full disk
        error = error.__context__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text.partition('. ')[0][:200]}"  # torch adds advice, sentence by sentence
