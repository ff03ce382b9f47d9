"""Two MLPs evaluated together give what they give one after the other."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from small_runs import small_config
from torch import Tensor, nn

from kernels import twin_mlp
from kernels.operations import Backend
from trainer import builder
from trainer.config import PolicyConfig
from trainer.policy import ActorCritic
from trainer.twin_policy import TwinActorCritic, twin_obstacle

triton_launch: Any = pytest.importorskip("kernels.triton_twin_launch", reason="needs Triton")

BACKENDS = ["torch", "triton"] if triton_launch.INTERPRETED else ["torch"]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
on_cpu = pytest.mark.skipif(not triton_launch.INTERPRETED, reason="needs the Triton interpreter")
ACTIVATIONS = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh}
#: Rows, inputs, hidden sizes, outputs of the first network (the second has one).
SHAPES = [(1, 3, [16], 2), (33, 60, [31, 17], 8), (257, 4, [64, 64], 2), (50, 5, [], 3)]

Networks = tuple[nn.Sequential, nn.Sequential]


def networks(inputs: int, hidden: list[int], outputs: int, activation: str = "elu") -> Networks:
    torch.manual_seed(0)

    def network(last: int) -> nn.Sequential:
        pairs = list(itertools.pairwise([inputs, *hidden, last]))
        layers = [m for x, y in pairs for m in (nn.Linear(x, y), ACTIVATIONS[activation]())]
        return nn.Sequential(*layers[:-1])

    return network(outputs), network(1)


def linears(network: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    return [(m.weight, m.bias) for m in network if isinstance(m, nn.Linear)]


def run(pair: Networks, inputs: Tensor, **options: Any) -> dict[str, Tensor]:
    """Outputs and gradients of a weighted sum of them, on the CPU; ``backend=None`` is the networks themselves."""
    for network in pair:
        network.zero_grad()
    if options.get("backend", "") is None:
        first, second = (network(inputs) for network in pair)
    else:
        first, second = twin_mlp(inputs, linears(pair[0]), linears(pair[1]), **options)
    weights = torch.linspace(0.5, 1.5, len(inputs), dtype=inputs.dtype, device=inputs.device)[:, None]
    ((first * weights).sum() + (second * weights.flip(0)).sum()).backward()
    gradients = {f"{i}.{n}": x.grad for i, network in enumerate(pair) for n, x in network.named_parameters()}
    found = {"first": first.detach(), "second": second.detach(), **gradients}
    return {name: x.cpu() for name, x in found.items() if x is not None}


def in_float64(pair: Networks, inputs: Tensor) -> dict[str, Tensor]:
    first, second = copy.deepcopy(pair)
    return run((first.double(), second.double()), inputs.double(), backend=None)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor within a share of its largest entry."""
    assert set(got) == set(expected)
    for name, x in expected.items():
        atol = tolerance * float(x.abs().max())
        torch.testing.assert_close(got[name].double(), x, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


@every_backend
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "inputs", "hidden", "outputs"), SHAPES)
def test_outputs_and_gradients_are_those_of_the_separate_networks(
    rows: int, inputs: int, hidden: list[int], outputs: int, activation: str, backend: str
) -> None:
    pair = networks(inputs, hidden, outputs, activation)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))
    got = run(pair, x, activation=activation, precision="float32", backend=backend)
    assert_close(got, in_float64(pair, x), 3e-6)


@on_cpu
@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 2e-3), ("bfloat16", 2e-2)])
def test_products_of_fewer_digits_stay_near_the_separate_networks(precision: str, tolerance: float) -> None:
    pair, x = networks(60, [64, 33], 8), torch.randn(70, 60, generator=torch.Generator().manual_seed(1))
    assert_close(run(pair, x, precision=precision, backend="triton"), in_float64(pair, x), tolerance)


@every_backend
def test_no_rows_give_no_outputs_and_no_gradient(backend: str) -> None:
    got = run(networks(5, [20], 3), torch.zeros(0, 5), precision="tf32", backend=backend)
    assert got["first"].shape == (0, 3) and got["second"].shape == (0, 1)
    assert all(not x.any() for x in got.values())


@on_cpu
def test_weights_are_packed_rounded_as_they_are_and_turned() -> None:
    """To the nearest tf32, ties away from 0; what is not finite stays."""
    ulp = 2.0**-10
    given = [1.0, 1 + 0.49 * ulp, 1 + 0.5 * ulp, -1 - 0.5 * ulp, 1 + 1.4 * ulp, 0.0, torch.inf, torch.nan]
    expected = [1.0, 1.0, 1 + ulp, -1 - ulp, 1 + ulp, 0.0, torch.inf, torch.nan]
    wide, tall = torch.tensor(given).view(2, 4), torch.arange(35.0 * 33).view(35, 33)
    packed, launch = triton_launch.pack([wide, torch.zeros(2), tall, torch.zeros(35)], triton_launch.FORMATS["tf32"])
    packed.fill_(torch.nan)
    triton_launch.run([launch], packed.device)
    rounded = torch.tensor(expected).view(2, 4)
    for half, weights in zip(packed[:, 0], ([rounded, tall], [rounded.t(), tall.t()]), strict=True):
        torch.testing.assert_close(half, torch.cat([w.flatten() for w in weights]), rtol=0, atol=0, equal_nan=True)


@on_cpu
def test_three_parts_of_a_weight_sum_to_it_in_every_digit() -> None:
    weight = torch.randn(33, 35, generator=torch.Generator().manual_seed(1))
    packed, launch = triton_launch.pack([weight, torch.zeros(33)], triton_launch.FORMATS["float32"])
    packed.fill_(torch.nan)
    triton_launch.run([launch], packed.device)
    for half, expected in zip(packed.double().sum(1), (weight, weight.t()), strict=True):
        assert torch.equal(half, expected.double().flatten())


@on_cpu
def test_sums_over_rows_are_joined_from_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "rows_of_part", lambda rows: 64)
    pair, x = networks(5, [20], 3), torch.randn(201, 5)
    assert_close(run(pair, x, precision="float32", backend="triton"), in_float64(pair, x), 3e-6)


@on_cpu
def test_every_element_of_every_output_is_written() -> None:
    pair, x = networks(5, [33, 20], 3), torch.randn(67, 5)
    expected = run(pair, x, precision="float32", backend="triton")
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        got = run(pair, x, precision="float32", backend="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@every_backend
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_nan_in_one_row_stays_in_its_row(activation: str, backend: str) -> None:
    pair, x = networks(5, [33, 20], 3, activation), torch.randn(67, 5)
    poisoned = x.clone()
    poisoned[13, 2] = torch.nan
    expected = run(pair, x, activation=activation, precision="float32", backend=backend)
    got = run(pair, poisoned, activation=activation, precision="float32", backend=backend)
    others = torch.arange(67) != 13
    for name in ("first", "second"):
        assert got[name][13].isnan().all()
        assert torch.equal(got[name][others], expected[name][others])


@every_backend
def test_rows_may_lie_apart(backend: str) -> None:
    pair, x = networks(5, [20], 3), torch.randn(33, 8)
    got = run(pair, x[:, :5], precision="float32", backend=backend)
    for name, value in run(pair, x[:, :5].contiguous(), precision="float32", backend=backend).items():
        assert torch.equal(got[name], value), name


@every_backend
def test_a_compiled_function_holds_both_networks_in_one_graph(backend: Backend) -> None:
    pair, x = networks(5, [20], 3), torch.randn(33, 5)

    def loss(first: list[tuple[Tensor, Tensor]], second: list[tuple[Tensor, Tensor]]) -> Tensor:
        outputs = twin_mlp(x, first, second, precision="float32", backend=backend)
        return outputs.first.square().sum() + outputs.second.sum()

    given = [linears(network) for network in pair]
    parameters = [p for network in pair for p in network.parameters()]
    expected = torch.autograd.grad(loss(*given), parameters)
    got = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*given), parameters)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"activation": "gelu"}, ValueError, "activation: expected one of elu, relu, tanh, got 'gelu'"),
        ({"precision": "fp8"}, ValueError, "precision: expected one of bfloat16, tf32, float32, got 'fp8'"),
        ({"inputs": [[0.0] * 5]}, TypeError, r"inputs: expected a tensor \[B, I\], got list"),
        (
            {"first": torch.nn.Linear(5, 3)},
            TypeError,
            "first: expected a list of layers, .* got Linear",
        ),
        (
            {"second": [torch.zeros(3, 5)]},
            TypeError,
            r"second\[0\]: expected tensors .* got shape \[3, 5\]",
        ),
        (
            {"second": [(torch.zeros(3, 5), None)]},
            TypeError,
            r"second\[0\]: expected tensors .* got tuple",
        ),
        ({"inputs": torch.zeros(5)}, ValueError, r"inputs: expected \[B, I\] with contiguous rows"),
        ({"inputs": torch.zeros(4, 6)}, ValueError, r"first\[0\]: expected a weight \[outputs, 6\]"),
        ({"inputs": torch.zeros(4, 5).double()}, TypeError, "expected float32 on cpu, got shape .* torch.float64"),
        (
            {"second": linears(networks(5, [21], 1)[1])},
            ValueError,
            r"second\[0\]: expected 20 outputs as first, got 21",
        ),
        ({"second": []}, ValueError, "second: expected as many layers as first, 2 and at least 1, got 0"),
        (
            {"first": [(torch.zeros(5, 20).t(), torch.zeros(20)), *linears(networks(5, [20], 3)[0])[1:]]},
            ValueError,
            r"first\[0\]: expected a contiguous weight and bias, got strides \(1, 20\) and \(1,\)",
        ),
        (
            {"second": [(torch.zeros(20, 5), torch.zeros(40)[::2]), *linears(networks(5, [20], 3)[1])[1:]]},
            ValueError,
            r"second\[0\]: expected a contiguous weight and bias, got strides \(5, 1\) and \(2,\)",
        ),
    ],
)
def test_what_it_cannot_take_is_refused_by_name(change: dict[str, Any], error: type[Exception], message: str) -> None:
    first, second = (linears(network) for network in networks(5, [20], 3))
    arguments: dict[str, Any] = {"inputs": torch.zeros(4, 5), "first": first, "second": second, **change}
    with pytest.raises(error, match=message):
        twin_mlp(**arguments)


# --- the policy -------------------------------------------------------------------------------------------------------


def policies(autocast_dtype: torch.dtype | None = None, device: str = "cpu") -> tuple[ActorCritic, ActorCritic]:
    box = gymnasium.spaces.Box(-1.0, 1.0, (5,), np.float32)
    made = []
    for kind in (ActorCritic, TwinActorCritic):
        torch.manual_seed(3)
        made.append(kind(box, box, PolicyConfig(hidden_sizes=[64, 32]), autocast_dtype).to(device))
    return made[0], made[1]


def test_a_twin_policy_has_the_parameters_and_outputs_of_a_plain_one() -> None:
    plain, twin = policies()
    twin.load_state_dict(plain.state_dict())
    for observations in (torch.randn(7, 5), torch.randn(3, 7, 5)):
        for got, expected in zip(twin.outputs(observations), plain.outputs(observations), strict=True):
            torch.testing.assert_close(got, expected)
            assert got is None or got.is_contiguous()


@pytest.mark.parametrize(
    ("change", "device", "message"),
    [
        ({}, "cpu", "needs device=cuda"),
        ({"core": "lstm"}, "cuda", "policy.core=lstm"),
        ({"hidden_sizes": [1024, 64]}, "cuda", "hidden layers of up to 512"),
        ({}, "cuda", None),
    ],
)
def test_a_twin_policy_says_where_it_cannot_stand(change: dict[str, Any], device: str, message: str | None) -> None:
    obstacle = twin_obstacle(PolicyConfig(**change), torch.device(device))
    assert obstacle is None if message is None else message in str(obstacle)


@pytest.mark.parametrize(
    ("settings", "is_twin"),
    [
        ((), True),
        (("matmul_precision=highest",), True),
        (("policy.backend=torch", "autocast=bfloat16"), False),
        (("policy.core=gru",), False),
    ],
)
def test_auto_takes_a_twin_policy_on_cuda_where_it_can_stand(
    settings: tuple[str, ...], is_twin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActorCritic, "to", lambda policy, device: policy)
    box = gymnasium.spaces.Box(-1.0, 1.0, (5,), np.float32)
    policy = builder.make_policy(small_config(*settings), box, box, torch.device("cuda"))
    assert isinstance(policy, TwinActorCritic) == is_twin


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 2e-2), ("tf32", 2e-3), ("float32", 3e-6)])
@pytest.mark.parametrize(("rows", "inputs", "hidden", "outputs"), [(4099, 60, [256, 128, 64], 8), (33, 3, [31, 17], 2)])
def test_on_a_gpu_both_networks_agree_with_float64_and_repeat_bit_for_bit(
    rows: int, inputs: int, hidden: list[int], outputs: int, precision: str, tolerance: float
) -> None:
    pair = networks(inputs, hidden, outputs)
    x = torch.randn(rows, inputs)
    expected = in_float64(pair, x)
    for network in pair:
        network.cuda()
    first, second = (run(pair, x.cuda(), precision=precision, backend="triton") for _ in range(2))
    assert_close(first, expected, tolerance)
    for name, value in first.items():
        assert torch.equal(second[name], value), name


@pytest.mark.gpu
@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16])
def test_on_a_gpu_a_twin_policy_agrees_with_a_plain_one(autocast_dtype: torch.dtype | None) -> None:
    plain, twin = policies(autocast_dtype, "cuda")
    observations = torch.randn(4099, 5, device="cuda")
    for got, expected in zip(twin.outputs(observations)[:3], plain.outputs(observations)[:3], strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
