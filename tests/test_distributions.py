"""Action distributions and policy heads against `torch.distributions`."""

import math

import gymnasium
import pytest
import torch
from torch import distributions as reference

from trainer.config import ConfigError, PolicyConfig
from trainer.distributions import Categorical, DiagonalGaussian, MultiCategorical, action_head
from trainer.policy import ActorCritic

SPACES = {
    "box": gymnasium.spaces.Box(-1, 1, (2,)),
    "box of one": gymnasium.spaces.Box(-1, 1, (1,)),
    "box of rank 2": gymnasium.spaces.Box(-1, 1, (2, 3)),
    "discrete": gymnasium.spaces.Discrete(4),
    "multi discrete": gymnasium.spaces.MultiDiscrete([2, 5, 3]),
    "multi discrete of one": gymnasium.spaces.MultiDiscrete([4]),
    "multi discrete of rank 2": gymnasium.spaces.MultiDiscrete([[2, 3], [4, 2]]),
}


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def policy(action_space: gymnasium.Space, **options) -> ActorCritic:
    torch.manual_seed(0)
    config = PolicyConfig(hidden_sizes=[8], activation="tanh", **options)
    return ActorCritic(gymnasium.spaces.Box(-1, 1, (5,)), action_space, config)


@pytest.mark.parametrize("actions", [1, 8])
def test_gaussian_log_prob_and_entropy_equal_torch_distributions(actions: int) -> None:
    generator = torch.Generator().manual_seed(actions)
    mean, log_std, taken = normal(generator, 63, actions), normal(generator, actions), normal(generator, 63, actions)
    ours = DiagonalGaussian(mean, log_std)
    theirs = reference.Independent(reference.Normal(mean, log_std.exp()), 1)
    torch.testing.assert_close(ours.log_prob(taken), theirs.log_prob(taken), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert ours.log_prob(taken).shape == ours.entropy().shape == (63,)
    assert torch.equal(ours.mode(), mean)


@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_categorical_log_prob_and_entropy_equal_torch_distributions(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = scale * normal(generator, 63, 5)
    taken = torch.randint(0, 5, (63,), generator=generator)
    ours, theirs = Categorical(logits), reference.Categorical(logits=logits)
    torch.testing.assert_close(ours.log_prob(taken), theirs.log_prob(taken))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert torch.equal(ours.mode(), theirs.mode)


@pytest.mark.parametrize("low", [-200.0, -math.inf])
def test_an_action_of_probability_zero_adds_nothing_to_the_entropy_and_its_gradient(low: float) -> None:
    logits = torch.tensor([[0.0, low, 1.0]], requires_grad=True)
    entropy = Categorical(logits).entropy()
    entropy.sum().backward()
    without = torch.tensor([[0.0, 1.0]], requires_grad=True)
    expected = Categorical(without).entropy()
    expected.sum().backward()
    torch.testing.assert_close(entropy, expected)
    assert logits.grad is not None and without.grad is not None
    torch.testing.assert_close(logits.grad[:, ::2], without.grad)
    assert logits.grad[0, 1] == 0


def test_gaussian_samples_have_the_mean_and_deviation() -> None:
    torch.manual_seed(0)
    count = 40_000
    mean, std = torch.tensor([1.0, -3.0]), torch.tensor([0.2, 5.0])
    samples = DiagonalGaussian(mean.expand(count, 2), std.log()).sample()
    five_errors = 5 * std / math.sqrt(count)
    assert ((samples.mean(0) - mean).abs() < five_errors).all()
    assert ((samples.std(0) - std).abs() < five_errors).all()


def test_categorical_samples_have_the_probabilities() -> None:
    torch.manual_seed(0)
    count = 40_000
    probabilities = torch.tensor([0.1, 0.0, 0.6, 0.3])
    samples = Categorical(probabilities.log().expand(count, 4)).sample()
    frequencies = torch.bincount(samples, minlength=4) / count
    assert samples.dtype == torch.int64
    assert frequencies[1] == 0
    assert (frequencies - probabilities).abs().max() < 5 * math.sqrt(0.25 / count)


def test_multi_categorical_is_the_product_of_its_components() -> None:
    generator = torch.Generator().manual_seed(2)
    choices, logits = (2, 5, 3), normal(generator, 21, 3, 10)
    ours = MultiCategorical(logits, choices)
    theirs = [reference.Categorical(logits=part) for part in (logits[..., :2], logits[..., 2:7], logits[..., 7:])]
    taken = torch.stack([torch.randint(0, n, (21, 3), generator=generator) for n in choices], dim=-1)
    log_probs = sum(part.log_prob(taken[..., i]) for i, part in enumerate(theirs))
    torch.testing.assert_close(ours.log_prob(taken), log_probs)
    torch.testing.assert_close(ours.entropy(), sum(part.entropy() for part in theirs))
    assert torch.equal(ours.mode(), torch.stack([part.mode for part in theirs], dim=-1))


def test_multi_categorical_samples_its_components_independently() -> None:
    torch.manual_seed(0)
    count = 40_000
    joint = torch.tensor([0.2, 0.8])[:, None] * torch.tensor([0.5, 0.1, 0.4])
    logits = torch.cat([joint.sum(1), joint.sum(0)]).log()
    samples = MultiCategorical(logits.expand(count, 5), (2, 3)).sample()
    frequencies = torch.bincount(3 * samples[:, 0] + samples[:, 1], minlength=6).view(2, 3) / count
    assert (frequencies - joint).abs().max() < 5 * math.sqrt(0.25 / count)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_acting_and_evaluating_agree_and_return_one_number_a_row(space: gymnasium.Space) -> None:
    actor_critic, observations = policy(space), torch.randn(7, 5)
    action = actor_critic.act(observations)
    distribution, outputs = actor_critic.distribution(observations), actor_critic.outputs(observations)
    log_probs = distribution.log_prob(actor_critic.head.flat(action.actions))
    assert action.actions.shape == (7, *(space.shape or ()))
    assert all(x.shape == (7,) for x in (action.log_probs, action.values, distribution.entropy()))
    assert torch.equal(log_probs, action.log_probs)
    assert torch.equal(outputs.values, action.values)
    assert actor_critic.act(observations, deterministic=True).actions.shape == action.actions.shape


def test_a_compiled_policy_step_draws_from_its_generator_as_an_eager_one() -> None:
    """Tracing leaves the draw outside its graphs; IMPALA's actors have a generator each."""
    actor_critic, observations = policy(SPACES["box"]), torch.randn(7, 5)
    actor_critic.generator = torch.Generator()
    drawn = []
    for act in (actor_critic.act, torch.compile(actor_critic.act, backend="eager")):
        actor_critic.generator.manual_seed(3)
        drawn.append(act(observations))
    for eager, compiled in zip(drawn[0][:3], drawn[1][:3], strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_a_policy_with_a_generator_draws_from_it_alone(space: gymnasium.Space) -> None:
    actor_critic, observations = policy(space), torch.randn(7, 5)
    actor_critic.generator = torch.Generator()
    before, drawn = torch.get_rng_state(), []
    for seed in (3, 4, 3):
        actor_critic.generator.manual_seed(seed)
        drawn.append(actor_critic.act(observations).actions)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_the_log_deviation_stays_in_its_bounds_and_finds_back_from_beyond() -> None:
    actor_critic = policy(SPACES["box"], min_log_std=-1.0, max_log_std=0.5)
    log_std = actor_critic.log_std
    assert log_std is not None
    with torch.no_grad():
        log_std.copy_(torch.tensor([-9.0, 9.0]))
    observations = torch.randn(3, 5)
    distribution = actor_critic.distribution(observations)
    assert isinstance(distribution, DiagonalGaussian)
    assert torch.equal(distribution.log_std, torch.tensor([-1.0, 0.5]))
    actor_critic.clamp_log_std_()
    actor_critic.distribution(observations).entropy().sum().backward()
    assert log_std.grad is not None and torch.equal(log_std.grad, torch.full((2,), 3.0))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float64])
def test_observations_may_have_any_dtype(dtype: torch.dtype) -> None:
    actor_critic = policy(SPACES["discrete"])
    observations = torch.arange(10).view(2, 5)
    expected = actor_critic.value(observations.float())
    assert torch.equal(actor_critic.value(observations.to(dtype)), expected)
    assert actor_critic.act(observations.to(dtype)).actions.shape == (2,)


@pytest.mark.parametrize(
    ("observations", "actions", "message"),
    [
        (gymnasium.spaces.Discrete(5), SPACES["box"], "observations of Discrete"),
        (gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.MultiBinary(3), "actions of MultiBinary"),
    ],
)
def test_spaces_without_a_head_are_refused(
    observations: gymnasium.Space, actions: gymnasium.Space, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"env.id: .*{message}"):
        ActorCritic(observations, actions, PolicyConfig())


def test_autocast_returns_float32_close_to_the_full_precision() -> None:
    full = policy(SPACES["box"])
    half = ActorCritic(gymnasium.spaces.Box(-1, 1, (5,)), SPACES["box"], PolicyConfig([8], "tanh"), torch.bfloat16)
    half.load_state_dict(full.state_dict())
    observations = torch.randn(7, 5)
    for a, b in zip(half.outputs(observations)[:3], full.outputs(observations)[:3], strict=True):
        assert a.dtype == torch.float32
        # bfloat16 has 8 bits; values here are sums of 8 terms of size 1
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_a_continuous_action_of_rank_0_is_one_number_per_row():
    head = action_head(gymnasium.spaces.Box(-1.0, 1.0, ()))
    distribution = head.distribution(torch.zeros(4, head.outputs), torch.zeros(1))
    actions = head.shaped(distribution.sample())
    assert actions.shape == (4,)
    expected = reference.Normal(0.0, 1.0).log_prob(actions)
    torch.testing.assert_close(distribution.log_prob(head.flat(actions)), expected)
