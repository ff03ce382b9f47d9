"""The bounded queue between actors and the learner: batches of rollouts that are filled and read where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from trainer.gate import Fence, Gate
from trainer.rollout import Rollout

Note = TypeVar("Note")


class FullBatch(NamedTuple, Generic[Note]):
    """A batch that the learner may read until it releases it."""

    number: int  #: batches are numbered from 0, in the order in which the learner takes them
    rollout: Rollout  #: ``[T, N]``, side by side along N what each actor of the group collected
    notes: list[Note]  #: what each actor submitted with its part, the last to submit last


class RolloutQueue(Generic[Note]):
    """``memory`` batches in turn: batch ``b`` lies in ``memory[b % len(memory)]``.

    Each batch is filled by ``parts`` actors, an equal range of columns each, and taken once all of them have submitted,
    strictly in the order of the numbers. An actor that is ahead waits until the learner has let go of the batch that
    its memory held (back-pressure); nothing is copied and nothing is allocated.

    Args:
        gate: shared with all that waits.
        memory: ``[T, N]`` rollouts on the device, at least one.
        parts: how many actors fill a batch; divides N.
    """

    def __init__(self, gate: Gate, memory: Sequence[Rollout], parts: int):
        self._gate, self._memory, self._parts = gate, memory, parts
        columns = memory[0].valid.shape[1] // parts
        self._views = [
            [batch.narrow(slice(part * columns, (part + 1) * columns)) for part in range(parts)] for batch in memory
        ]
        self._fences = [Fence(batch.valid.device) for batch in memory]
        self._notes: list[list[Note]] = [[] for _ in memory]
        self._taken = 0  #: batches below this number were taken by the learner
        self._released = 0  #: of those, batches whose memory may be filled again

    def acquire(self, number: int, part: int) -> Rollout:
        """The part of batch ``number`` that an actor may fill; waits until its memory is free.

        Raises:
            Closed: the run is ending.
        """
        place = number % len(self._memory)
        with self._gate.when(lambda: number < self._released + len(self._memory)):
            self._fences[place].join()
            return self._views[place][part]

    def submit(self, number: int, note: Note) -> None:
        """Hand over the part that was acquired.

        Raises:
            Closed: the run is ending.
        """
        place = number % len(self._memory)
        with self._gate.alone():
            self._fences[place].join()
            self._notes[place].append(note)

    def take(self, watch: Callable[[], None] | None = None) -> FullBatch[Note]:
        """The next batch; waits until all its parts were submitted.

        Args:
            watch: called now and then while it waits; what it raises ends the wait.

        Raises:
            Closed: the run is ending.
        """
        place = self._taken % len(self._memory)
        with self._gate.when(lambda: len(self._notes[place]) == self._parts, watch):
            self._fences[place].join()
            batch = FullBatch(self._taken, self._memory[place], list(self._notes[place]))
            self._taken += 1
            return batch

    def release(self) -> None:
        """Let go of the batch that was taken last, if any: its memory may be filled again."""
        with self._gate.alone():
            if self._released < self._taken:
                place = self._released % len(self._memory)
                self._fences[place].join()
                self._notes[place].clear()
                self._released = self._taken
