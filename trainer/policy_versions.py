"""The parameters on their way from the learner to the actors: numbered snapshots, never read half written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.gate import Fence, Gate


def tensors_of(*modules: nn.Module | None) -> list[Tensor]:
    """All parameters and buffers of some modules, in a fixed order; None has none."""
    return [tensor for module in modules if module is not None for tensor in module.state_dict().values()]


class PolicyVersions:
    """The newest ``depth`` versions of the learner's tensors, on their device.

    Version ``v`` is what they were after ``v`` updates, and lies in snapshot ``v % depth``: while actors read one, the
    learner writes the next. Reading and writing are ordered by the gate's lock, and on CUDA by an event per snapshot.

    Args:
        gate: shared with all that waits.
        tensors: the learner's, which it changes in place.
        depth: versions kept, at least 2.
    """

    def __init__(self, gate: Gate, tensors: Sequence[Tensor], depth: int):
        self._gate, self._tensors, self._depth = gate, tuple(tensors), depth
        self._snapshots = [[torch.empty_like(tensor) for tensor in tensors] for _ in range(depth)]
        self._fences = [Fence(tensors[0].device) for _ in range(depth)]
        self.newest = -1  #: the last published version; -1 before the first
        self._oldest = 0  #: below 0 after `recall`

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the learner's tensors as the next version, and make it known.

        Raises:
            Closed: the run is ending.
        """
        with self._gate.alone():
            place = (self.newest + 1) % self._depth
            self._fences[place].join()
            _copy(self._tensors, self._snapshots[place])
            self._fences[place].join()
            self.newest += 1

    def history(self) -> list[list[Tensor]]:
        """The versions that actors may still ask for once the next one is published, the oldest first; only while none
        is written."""
        first = max(self._oldest, self.newest + 3 - self._depth)
        return [self._snapshots[version % self._depth] for version in range(first, self.newest + 1)]

    def recall(self, history: Sequence[Sequence[Tensor]]) -> None:
        """Number what `history` gave before the run was stopped from below: its last version is -1."""
        recalled = list(history)[max(0, len(history) + 2 - self._depth) :]
        self._oldest = -len(recalled)
        for version, tensors in enumerate(recalled, start=self._oldest):
            _copy(tensors, self._snapshots[version % self._depth])

    @torch.no_grad()
    def read(self, into: Sequence[Tensor], at_least: int, exactly: bool = False) -> int:
        """Copy a version into an actor's own tensors, and return its number.

        Args:
            into: tensors as those of the learner.
            at_least: waits until this version was published; where there is none so old, the oldest.
            exactly: take that version, which must be one of those kept, and not the newest.

        Raises:
            Closed: the run is ending.
        """
        at_least = max(at_least, self._oldest)
        with self._gate.when(lambda: self.newest >= at_least):
            version = at_least if exactly else self.newest
            place = version % self._depth
            self._fences[place].join()
            _copy(self._snapshots[place], into)
            self._fences[place].join()
            return version


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    # in one call: between two calls another thread may take the interpreter, and the gate's lock is held
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]
