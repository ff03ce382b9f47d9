"""Parameters on their way to the actors: whole, numbered, and as old as was asked for."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from trainer.gate import Closed, Gate
from trainer.policy_versions import PolicyVersions, tensors_of


class Module(nn.Module):
    """Parameters and buffers of several dtypes, all of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(31, 17)
        self.register_buffer("moments", torch.zeros(9, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.fill(0)

    @torch.no_grad()
    def fill(self, value: int) -> None:
        for tensor in self.state_dict().values():
            tensor.fill_(value)

    def values(self) -> set[float]:
        return {x for tensor in self.state_dict().values() for x in tensor.flatten().tolist()}


def publish_up_to(version: int, depth: int) -> tuple[PolicyVersions, Module]:
    learner = Module()
    versions = PolicyVersions(Gate(), tensors_of(learner), depth)
    for number in range(version + 1):
        learner.fill(number)
        versions.publish()
    return versions, learner


def test_an_actor_reads_the_newest_version():
    versions, learner = publish_up_to(5, depth=2)
    learner.fill(99)  # not published
    actor = Module()
    assert versions.read(tensors_of(actor), at_least=0) == 5
    assert actor.values() == {5.0}


@pytest.mark.parametrize("lag", [0, 1, 4, 16])
def test_an_older_version_that_is_kept_can_be_asked_for(lag: int):
    versions, _ = publish_up_to(20, depth=2 + lag)
    actor = Module()
    assert versions.read(tensors_of(actor), at_least=20 - lag, exactly=True) == 20 - lag
    assert actor.values() == {20.0 - lag}


def test_recalled_versions_are_numbered_from_below():
    stopped, learner = publish_up_to(20, depth=5)
    resumed = PolicyVersions(Gate(), tensors_of(learner), depth=5)
    resumed.recall(stopped.history())
    learner.fill(21)
    resumed.publish()
    for version, value in ((-3, 18), (-1, 20), (0, 21), (-7, 18)):
        actor = Module()
        assert resumed.read(tensors_of(actor), version, exactly=True) == max(version, -3)
        assert actor.values() == {float(value)}


def test_who_asks_for_a_version_that_is_not_there_yet_waits_for_it():
    versions, learner = publish_up_to(2, depth=2)
    actor, read = Module(), []
    thread = threading.Thread(target=lambda: read.append(versions.read(tensors_of(actor), at_least=3)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert not read
    learner.fill(3)
    versions.publish()
    thread.join(5)
    assert read == [3]
    assert actor.values() == {3.0}


def test_no_actor_ever_reads_half_written_weights():
    learner = Module()
    gate = Gate()
    versions = PolicyVersions(gate, tensors_of(learner), depth=2)
    versions.publish()
    torn: list[tuple[int, set[float]]] = []
    reads: list[int] = []

    def act() -> None:
        actor, last = Module(), -1
        try:
            while True:
                version = versions.read(tensors_of(actor), at_least=0)
                if actor.values() != {float(version)} or version < last:
                    torn.append((version, actor.values()))
                last = version
                reads.append(version)
        except Closed:
            return

    threads = [threading.Thread(target=act, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1, 300):
        learner.fill(number)
        versions.publish()
    gate.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert torn == []
    assert len(set(reads)) > 1
