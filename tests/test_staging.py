"""Rows on their way to the device and actions on their way back: memory is written again only when it was read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from envs import staging
from envs.staging import Field, HostCopy, StagingRing

FIELDS = [Field((5, 3), torch.float32), Field((5,), torch.float32), Field((5,), torch.bool), Field((5, 7), torch.uint8)]


def host_tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(5, 3, generator=generator, dtype=torch.float64),
        torch.randn(5, generator=generator),
        torch.randn(5, generator=generator) > 0,
        torch.randint(256, (5, 7), generator=generator, dtype=torch.uint8),
    ]


def test_a_slot_is_written_only_after_its_last_copy_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class FakeEvent:
        def __init__(self) -> None:
            self.name = sum(call.startswith("made") for call in calls)
            calls.append(f"made {self.name}")

        def synchronize(self) -> None:
            calls.append(f"waited for {self.name}")

        def record(self, stream: object) -> None:
            calls.append(f"recorded {self.name}")

    cuda = SimpleNamespace(Event=FakeEvent, current_stream=lambda device: None)
    monkeypatch.setattr(staging.torch, "cuda", cuda)
    ring = StagingRing(FIELDS, torch.device("cpu"), depth=2)
    staged = [ring.to_device([tensor.numpy() for tensor in host_tensors(seed)]) for seed in range(3)]
    turn = [f"{verb} {slot}" for slot in (0, 1, 0) for verb in ("waited for", "recorded")]
    assert calls == ["made 0", "made 1", *turn]
    assert all(one is same for tensors in staged for one, same in zip(tensors, staged[0], strict=True))
    for found, field, source in zip(staged[0], FIELDS, host_tensors(2), strict=True):
        assert torch.equal(found, source.to(field.dtype))


@pytest.mark.gpu
def test_staged_steps_hold_their_values_on_a_busy_device() -> None:
    device = torch.device("cuda")
    ring = StagingRing(FIELDS, device)
    staged = []
    for seed in range(20):
        torch.cuda._sleep(1_000_000)  # the copies lag behind the host
        staged.append([tensor.clone() for tensor in ring.to_device([t.numpy() for t in host_tensors(seed)])])
    for seed, tensors in enumerate(staged):
        for found, field, source in zip(tensors, FIELDS, host_tensors(seed), strict=True):
            assert torch.equal(found.cpu(), source.to(field.dtype))


@pytest.mark.gpu
def test_actions_reach_the_host_after_the_work_that_makes_them() -> None:
    field = Field((5, 3), torch.float32)
    copy, expected = HostCopy(field), np.arange(15, dtype=np.float32).reshape(field.shape)
    for step in range(3):
        torch.cuda._sleep(10_000_000)
        made = torch.from_numpy(expected).cuda() + step
        assert np.array_equal(copy.to_host(made), expected + step)
