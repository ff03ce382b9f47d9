"""The policy's step for several actors at once: whose requests wait at the same time are evaluated as one batch."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.gate import Closed
from trainer.policy import Action


@dataclass(eq=False)
class Request:
    """What an actor asks its policy."""

    act: Callable[..., Action]  #: its own copy's step
    version: int  #: of this copy: equal versions have equal weights and scale observations alike
    inputs: tuple[Tensor, ...]  #: ``[batch, ...]`` each, what ``act`` takes; batches of one run differ in size alone
    stream: torch.cuda.Stream | None  #: on which the inputs are made and the answer is read; None on a CPU
    answer: Action | None = None  #: of as many rows


class SharedInference:
    """Flat combining (Hendler, Incze, Shavit and Tzafrir 2010): whoever holds the lock serves all that wait for it.

    Nobody waits to be joined: an actor that finds the lock free acts at once, and those that come meanwhile make the
    next batch. Requests of different versions are never mixed, so that every window is still of one version; those of
    another wait for their own threads to serve them. The actor that serves evaluates the batch by its own copy of the
    policy, with its own random numbers and on its own CUDA stream.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()  # threads that have not got the lock append to it
        self._has_failed = False
        self._counts: Counter[int] = Counter()

    def act(self, request: Request) -> Action:
        """The answer to a request, from whichever thread came to evaluate it.

        Raises:
            Closed: the step failed in the thread of another actor, whose error ends the run.
            Exception: it failed in this one.
        """
        self._waiting.append(request)
        with self._lock:
            if request.answer is None and not self._has_failed:
                self._serve(request)
        if request.answer is None:
            raise Closed
        return request.answer

    def histogram(self) -> list[int]:
        """How many policy steps were taken for 1, 2, 3, ... actors at once since the run began."""
        with self._lock:
            return [self._counts[actors] for actors in range(1, max(self._counts, default=0) + 1)]

    def _serve(self, leader: Request) -> None:
        requests = self._take(leader)
        try:
            answers = _evaluate(requests)
        except BaseException:
            self._has_failed = True
            raise
        for request, answer in zip(requests, answers, strict=True):
            request.answer = answer
        self._counts[len(requests)] += 1

    def _take(self, leader: Request) -> list[Request]:
        """The leader and all that wait for an answer of its version."""
        taken = [leader]
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if request is not leader:
                (taken if request.version == leader.version else self._waiting).append(request)
        return taken


def _evaluate(requests: Sequence[Request]) -> list[Action]:
    """The first request's policy over the rows of all.

    On CUDA the first one's stream waits for the inputs of the others, whose streams then wait for it: before that
    nothing of theirs can be freed, and the answers are its own memory, which must not be used again before they did.
    """
    leader, *others = requests
    if not others:
        return [leader.act(*leader.inputs)]
    for request in others:
        _wait(leader.stream, request.stream)
    action = leader.act(*map(torch.cat, zip(*(request.inputs for request in requests), strict=True)))
    sizes = [len(request.inputs[0]) for request in requests]
    parts = [(None,) * len(sizes) if tensor is None else tensor.split(sizes) for tensor in action]
    answers = [Action(*fields) for fields in zip(*parts, strict=True)]
    for request, answer in zip(others, answers[1:], strict=True):
        _wait(request.stream, leader.stream)
        _keep(answer, request.stream)
    return answers


def _wait(stream: torch.cuda.Stream | None, other: torch.cuda.Stream | None) -> None:
    """What follows on a stream begins after what another one was given so far; on a CPU it does anyway."""
    if stream is not None and other is not None:
        stream.wait_stream(other)


def _keep(answer: Action, stream: torch.cuda.Stream | None) -> None:
    """Keep an answer's memory, once nobody holds it, until this stream has read it."""
    for tensor in answer:
        if stream is not None and tensor is not None:
            tensor.record_stream(stream)
