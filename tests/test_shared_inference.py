"""Policy steps of several actors at once: who meets whom, that each gets its own rows, and how it ends."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tape
import torch
from gymnasium import spaces
from impala_runs import impala_config, updates
from torch import Tensor

from trainer import graphs, loop
from trainer.builder import set_precision
from trainer.config import ConfigError, PolicyConfig
from trainer.gate import Closed
from trainer.graphs import Graphs
from trainer.policy import Action, ActorCritic
from trainer.q_policy import QActorCritic
from trainer.shared_inference import Request, SharedInference

BATCHED = ("env.pools=4", "impala.batch_inference=true")
DISCRETE = spaces.Discrete(3)
VECTOR = spaces.Box(-np.inf, np.inf, (3,))
FRAMES = spaces.Box(0, 255, (2, 40, 40), np.uint8)

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def make_policy(
    action_space: spaces.Space[Any] = DISCRETE,
    space: spaces.Box = VECTOR,
    core: str = "none",
    kind: type[ActorCritic] = ActorCritic,
    seed: int = 0,
) -> ActorCritic:
    torch.manual_seed(seed)
    torso = "nature_cnn" if space is FRAMES else "mlp"
    policy = kind(space, action_space, PolicyConfig(hidden_sizes=[8], torso=torso, core=core, core_size=5))
    return policy.requires_grad_(False)


def make_request(policy: ActorCritic, size: int, version: int = 0, space: spaces.Box = VECTOR) -> Request:
    """A request of an actor that has a copy of the policy, and episodes that ended, if it has a memory."""
    own = copy.deepcopy(policy)
    own.generator = torch.Generator().manual_seed(size)
    observations = torch.randint(0, 256, (size, *space.shape)) if space is FRAMES else torch.randn(size, *space.shape)
    memory = (torch.randn(size, policy.state_size), torch.rand(size) < 0.5) if policy.state_size else ()
    return Request(own.act, version, (observations.to(getattr(torch, str(space.dtype))), *memory), None)


def meet(shared: SharedInference, requests: Sequence[Request]) -> list[Future[Action]]:
    """What comes of requests, each in a thread of its own, that all wait while another's step is under way."""
    under_way, done = threading.Event(), threading.Event()

    def act() -> Action:
        under_way.set()
        done.wait(10)
        return Action(torch.empty(0), torch.empty(0), torch.empty(0), None)

    with ThreadPoolExecutor(1 + len(requests)) as threads:
        threads.submit(shared.act, Request(act, -1, (), None))
        under_way.wait(10)
        results = [threads.submit(shared.act, request) for request in requests]
        deadline = time.monotonic() + 10
        while len(shared._waiting) < len(requests) and time.monotonic() < deadline:
            time.sleep(0.001)
        done.set()
    return results


def assert_is_of(policy: ActorCritic, request: Request, answer: Action) -> None:
    """The policy alone says the same of the request's rows and of the actions that were drawn for them."""
    distribution = policy.distribution(*request.inputs)
    torch.testing.assert_close(answer.log_probs, distribution.log_prob(policy.head.flat(answer.actions)))
    torch.testing.assert_close(answer.values, policy.value(*request.inputs))
    torch.testing.assert_close(answer.state, policy.outputs(*request.inputs).state)
    assert answer.actions.shape == (len(request.inputs[0]), *policy.action_shape)
    assert answer.actions.dtype == policy.action_dtype


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"action_space": spaces.Box(-1, 1, (2, 2))},
        {"action_space": spaces.MultiDiscrete([3, 2])},
        {"core": "lstm"},
        {"core": "gru", "kind": QActorCritic},
        {"space": FRAMES},
    ],
    ids=str,
)
def test_requests_that_wait_together_are_answered_by_one_step_each_with_its_own_rows(settings: dict[str, Any]):
    policy, shared = make_policy(**settings), SharedInference()
    requests = [make_request(policy, size, space=settings.get("space", VECTOR)) for size in (1, 3, 2)]
    results = meet(shared, requests)
    assert shared.histogram() == [1, 0, 1], "the step that was under way, and one for all three"
    for request, result in zip(requests, results, strict=True):
        assert_is_of(policy, request, result.result())


def test_an_actor_that_meets_nobody_acts_at_once_as_it_does_alone():
    policy, shared = make_policy(), SharedInference()
    request, alone = make_request(policy, 5), copy.deepcopy(policy)
    alone.generator = torch.Generator().manual_seed(5)
    answer = shared.act(request)
    for tensor, expected in zip(answer, alone.act(request.inputs[0]), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0.0, atol=0.0)
    assert shared.histogram() == [1]


def test_versions_of_the_policy_are_never_mixed():
    policies, shared = [make_policy(seed=version) for version in range(3)], SharedInference()
    versions = (2, 0, 1, 0, 2, 0)
    requests = [make_request(policies[version], 1 + n, version) for n, version in enumerate(versions)]
    results = meet(shared, requests)
    assert shared.histogram() == [2, 1, 1], "one step for each version, and the one that was under way"
    for version, request, result in zip(versions, requests, results, strict=True):
        assert_is_of(policies[version], request, result.result())


def test_observations_that_are_not_finite_reach_no_other_actor():
    policy, shared = make_policy(core="gru"), SharedInference()
    requests = [make_request(policy, 3) for _ in range(3)]
    requests[1].inputs[0][:] = torch.tensor([torch.nan, torch.inf, 0.0])
    first, spoilt, last = (result.result() for result in meet(shared, requests))
    assert shared.histogram() == [1, 0, 1]
    assert spoilt.values.isnan().all()
    assert_is_of(policy, requests[0], first)
    assert_is_of(policy, requests[2], last)


def test_an_error_reaches_all_whom_the_step_was_for_and_nobody_hangs():
    def fails(*_: Tensor) -> Action:
        raise ValueError("boom")

    shared = SharedInference()
    results = meet(shared, [Request(fails, version, (torch.zeros(2, 3),), None) for version in (0, 0, 1, 0)])
    errors = sorted((result.exception() for result in results), key=lambda error: type(error).__name__)
    assert [type(error) for error in errors] == [Closed, Closed, Closed, ValueError]
    with pytest.raises(Closed):
        shared.act(make_request(make_policy(), 1))


def slow_steps(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None) -> None:
    """Policy steps that take long enough for others to come."""
    original = ActorCritic.act

    def act(self: ActorCritic, *inputs: Any) -> Action:
        time.sleep(0.002)
        then()
        return original(self, *inputs)

    monkeypatch.setattr(ActorCritic, "act", act)


@pytest.mark.parametrize("settings", [(), ("policy.core=gru", "policy.core_size=4", "impala.rollouts_per_update=2")])
def test_a_run_batches_its_actors_trains_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
):
    slow_steps(monkeypatch)
    metrics = updates(10, *BATCHED, "normalize.observations=true", *settings)
    assert all(m["skipped_minibatches"] == 0 for m in metrics)
    counts = metrics[-1]["actor/batch_histogram"]
    acted = sum(actors * steps for actors, steps in enumerate(counts, start=1))
    assert acted >= 8 * sum(metrics[-1]["lag/histogram"]), "eight rows a window"
    assert metrics[-1]["actor/batched"] == pytest.approx(acted / sum(counts))
    assert metrics[-1]["actor/batched"] > 1.2, "steps this slow are waited for"


def test_an_error_in_a_shared_step_ends_the_run_with_its_own_traceback(monkeypatch: pytest.MonkeyPatch):
    calls: list[None] = []

    def fail_late() -> None:
        calls.append(None)
        if len(calls) > 60:
            raise ValueError("boom")

    slow_steps(monkeypatch, fail_late)
    with pytest.raises(ValueError, match="boom"):
        updates(100, *BATCHED)


def test_nothing_is_shared_unless_it_is_asked_for():
    (metrics,) = updates(1, "env.pools=4")
    assert not [key for key in metrics if key.startswith("actor/batch")]


@pytest.mark.parametrize(("shared", "expected"), [("false", True), ("true", False)])
def test_a_shared_step_is_in_no_graph_and_all_others_are(monkeypatch: pytest.MonkeyPatch, shared: str, expected: bool):
    captured: set[str] = set()

    def capture(steps: Any, own: Graphs, name: str) -> Any:
        captured.add(name)
        return tape.capture(steps, own, name)

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(loop, "make_graphs", lambda config, device, clock, console: Graphs(clock, enabled=True))
    updates(10, "env.engine=torch", "env.pools=2", f"impala.batch_inference={shared}")
    assert ("the policy step of pool 0" in captured) == expected
    assert {"the rollout's start", "the rollout's end"} <= captured


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("env.pools=1",), "impala.batch_inference=true has nothing to batch with one actor (env.pools=1, num_envs=8)"),
        (("num_envs=3",), "impala.batch_inference=true has nothing to batch with one actor (env.pools=0, num_envs=3)"),
        (("impala.force_lag=2",), "impala.batch_inference=true batches actors in threads, and impala.force_lag=2"),
    ],
)
def test_a_run_that_could_never_batch_is_refused_by_name(overrides: tuple[str, ...], named: str):
    with pytest.raises(ConfigError) as refusal:
        impala_config("impala.batch_inference=true", *overrides)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.gpu
def test_streams_wait_for_one_anothers_rows_and_keep_them_as_long_as_they_are_read():
    """Inputs are made late and answers are read late, while whoever served has its memory back for its next round."""
    set_precision("highest")
    policy, shared, rounds = make_policy(core="gru").cuda(), SharedInference(), 60
    together = threading.Barrier(4)
    torch.cuda.synchronize()

    def actor(number: int) -> float:
        stream, size = torch.cuda.Stream(), 1000 + number
        with torch.cuda.stream(stream):
            own, worst = copy.deepcopy(policy), torch.zeros((), device="cuda")
            own.generator = torch.Generator("cuda").manual_seed(number)
            for _ in range(rounds):
                together.wait(60)
                torch.cuda._sleep(2_000_000)
                features, state = (torch.randn(size, width, device="cuda") for width in (3, 5))
                inputs = (features, state, torch.rand(size, device="cuda") < 0.5)
                answer = shared.act(Request(own.act, 0, inputs, stream))
                torch.cuda._sleep(2_000_000 * number)
                log_probs = own.distribution(*inputs).log_prob(answer.actions)
                for one, other in ((log_probs, answer.log_probs), (own.value(*inputs), answer.values)):
                    worst = torch.maximum(worst, (one - other).abs().max())
                del answer, other
            return float(worst)

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(actor, range(4))) < 1e-4
    counts = shared.histogram()
    assert sum(actors * steps for actors, steps in enumerate(counts, start=1)) == 4 * rounds
    assert len(counts) > 1, "some met"
