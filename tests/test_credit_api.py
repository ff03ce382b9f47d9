"""The public credit operations: what they refuse, and what their options do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from credit_cases import OPERATIONS, assert_close, random_window, run, run_reference
from torch import Tensor

import kernels
from kernels import Credit, CreditWithMoments, Scan, VTrace, VTraceWithMoments

TORCH: dict[str, Any] = {"backend": "torch", "torch_mode": "scan"}
every_operation = pytest.mark.parametrize("operation", OPERATIONS)


@pytest.fixture
def window() -> dict[str, Any]:
    return random_window("gae", 6, 3, 0)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rewards": [1.0]}, TypeError, "rewards: expected a tensor"),
        ({"values": None}, TypeError, "values: expected a tensor"),
        (
            {"values": torch.zeros(6, 4)},
            ValueError,
            r"values: expected shape \[T, N\] with T = 6, N = 3, got shape \[6, 4",
        ),
        ({"values": torch.zeros(18)}, ValueError, r"values: expected shape \[T, N\], got shape \[18\]"),
        ({"values": torch.zeros(6, 3, dtype=torch.int64)}, TypeError, "values: expected dtype float32.*torch.int64"),
        ({"last_value": torch.zeros(1, 3)}, ValueError, r"last_value: expected shape \[N\]"),
        ({"terminated": torch.zeros(6, 3)}, TypeError, "terminated: expected dtype bool, uint8.*torch.float32"),
        ({"truncated": torch.zeros(6, 3, dtype=torch.int32)}, TypeError, "truncated: expected dtype bool, uint8"),
        ({"valid": torch.ones(5, 3, dtype=torch.bool)}, ValueError, "valid: expected shape"),
        ({"values": torch.zeros(6, 3, device="meta")}, ValueError, "values: expected device cpu as rewards.*meta"),
        ({"gamma": 1.01}, ValueError, r"gamma: expected a number in \[0, 1\], got 1.01"),
        ({"gamma": float("nan")}, ValueError, "gamma"),
        ({"gamma": "0.9"}, TypeError, "gamma: expected a number"),
        ({"gamma": True}, TypeError, "gamma: expected a number"),
        ({"gamma": torch.full((4,), 0.9)}, ValueError, r"gamma: expected shape \[N\]"),
        ({"gamma": torch.full((3,), 0.9, dtype=torch.bfloat16)}, TypeError, "gamma: expected dtype float32, float64"),
        ({"gae_lambda": -0.1}, ValueError, r"gae_lambda: expected a number in \[0, 1\]"),
        ({"out": torch.zeros(6, 3)}, TypeError, "out: expected a tuple of tensors"),
        ({"out": (torch.zeros(6, 3),)}, ValueError, "out: expected 2 tensors"),
        ({"out": (torch.zeros(6, 3), torch.zeros(3, 6))}, ValueError, "out: expected value_targets of shape"),
        ({"out": (torch.zeros(6, 3), torch.zeros(6, 1).expand(6, 3))}, ValueError, "without overlapping rows"),
        ({"out": (torch.zeros(6, 3).requires_grad_(), torch.zeros(6, 3))}, ValueError, "out: expected .* without grad"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype"),
        ({"moments": "yes"}, TypeError, "moments: expected True or False, got str 'yes'"),
        ({"values": torch.zeros(6, 3).to_sparse()}, TypeError, "values: expected a dense tensor, got torch.sparse_coo"),
        (
            {"terminated": torch.zeros(6, 3).numpy()},
            TypeError,
            r"terminated: expected a tensor \[T, N\], got ndarray of shape \[6, 3\], float32",
        ),
    ],
)
@pytest.mark.parametrize("options", [TORCH, {"backend": "triton"}], ids=["torch", "triton"])
def test_a_bad_argument_is_refused_by_name(
    window: dict[str, Any], options: dict[str, Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as refusal:
        kernels.gae(**{**window, **change}, **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("options", [TORCH, {"backend": "triton"}], ids=["torch", "triton"])
def test_an_output_that_is_an_input_or_the_other_output_is_refused_every_time(
    window: dict[str, Any], options: dict[str, Any]
) -> None:
    fresh = torch.zeros(6, 3)
    kernels.gae(**window, out=(fresh, torch.zeros(6, 3)), **options)
    for _ in range(2):
        for out in ((fresh, fresh), (fresh, window["rewards"])):
            with pytest.raises(ValueError, match="out: expected memory that no input and no other output has"):
                kernels.gae(**window, out=out, **options)


@pytest.mark.parametrize("options", [TORCH, {"backend": "triton"}], ids=["torch", "triton"])
def test_a_negative_view_is_refused_every_time(window: dict[str, Any], options: dict[str, Any]) -> None:
    out = (torch.zeros(6, 3), torch.zeros(6, 3))
    negative = torch.zeros(6, 3, dtype=torch.cfloat).conj().imag
    for _ in range(2):
        kernels.gae(**window, out=out, **options)
        with pytest.raises(ValueError, match=r"rewards: expected numbers as stored.*resolve_neg"):
            kernels.gae(**{**window, "rewards": negative}, out=out, **options)
        with pytest.raises(ValueError, match="out: expected value_targets as stored, got a negative view"):
            kernels.gae(**window, out=(out[0], negative), **options)


def test_an_unknown_backend_or_mode_is_refused(window: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="backend: expected one of triton, torch, auto, got 'cuda'"):
        kernels.gae(**window, backend="cuda")  # pyright: ignore[reportArgumentType]
    for backend in ("torch", "triton", "auto"):
        with pytest.raises(ValueError, match="torch_mode: expected one of auto, loop, scan, compiled, got 'fast'"):
            kernels.gae(**window, backend=backend, torch_mode="fast")  # pyright: ignore[reportArgumentType]


def test_an_unknown_argument_is_refused(window: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="boundary"):
        kernels.gae(**window, boundary=1)


@pytest.mark.parametrize("options", [TORCH, {"backend": "triton"}], ids=["torch", "triton"])
def test_truncated_rows_need_bootstrap_values_in_discounted_returns(options: dict[str, Any]) -> None:
    inputs = {**random_window("discounted_returns", 6, 3, 0), "bootstrap_values": None}
    with pytest.raises(ValueError, match="bootstrap_values: needed where truncated is given"):
        kernels.discounted_returns(**inputs, **options)


def test_a_negative_ratio_bound_is_refused_and_an_infinite_one_is_not() -> None:
    inputs = random_window("vtrace", 6, 3, 0)
    with pytest.raises(ValueError, match="rho_bar"):
        kernels.vtrace(**{**inputs, "rho_bar": -1.0}, **TORCH)
    kernels.vtrace(**{**inputs, "rho_bar": float("inf")}, **TORCH)


def printed_alone(code: str) -> str:
    """What a process of its own prints, without this one's environment."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ".", "HOME": "/nonexistent"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout


def test_triton_on_a_cpu_is_refused_without_the_interpreter() -> None:
    code = (
        "import torch, kernels\n"
        "x, f = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bool)\n"
        "try:\n    kernels.gae(x, x, x[0], f)\n"
        "except ValueError as error:\n    print(error)\n"
        "kernels.gae(x, x, x[0], f, backend='auto')\n"
    )
    assert printed_alone(code).startswith("backend: 'triton' needs CUDA tensors, got rewards of shape [2, 2]")


def test_kernels_works_without_triton_and_imports_nothing_of_the_trainer_and_no_compiler() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, kernels\n"
        "x, f = torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool)\n"
        "kernels.gae(x, x, x[0], f, backend='auto')\n"
        "print(*{'trainer', 'envs', 'hydra', 'wandb', 'gymnasium', 'torch._dynamo'} & set(sys.modules))\n"
    )
    assert printed_alone(code).strip() == ""


def test_triton_is_refused_by_its_argument_where_it_is_not_installed() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, kernels\n"
        "from kernels.shuffle import shuffle_\n"
        "x, f = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bool)\n"
        "layers, coefficients = [(x, x[0])], {'clip_range': 0.2, 'value_coef': 1.0, 'entropy_coef': 0.0}\n"
        "for call in (\n"
        "    lambda: kernels.gae(x, x, x[0], f),\n"
        "    lambda: kernels.ppo_loss(x, x[0], x[0].long(), x[0], x[0], x[0], backend='triton', **coefficients),\n"
        "    lambda: kernels.twin_mlp(x, layers, layers, backend='triton'),\n"
        "    lambda: shuffle_(torch.zeros(2, 2, dtype=torch.int64), backend='triton'),\n"
        "):\n"
        "    try:\n        call()\n    except ValueError as error:\n        print(error)\n"
    )
    refusal = "backend: 'triton' needs the package triton, which is not installed; use 'torch' or 'auto'"
    assert printed_alone(code).splitlines() == [refusal] * 4


# --- options --------------------------------------------------------------------------------------------------------


@every_operation
def test_out_is_written_and_returned(operation: str) -> None:
    inputs = random_window(operation, 6, 3, 0)
    expected = run(operation, inputs, **TORCH)
    out = tuple(torch.full_like(x, float("nan")) for x in expected)
    run(operation, inputs, out=out, **TORCH)
    for got, want in zip(out, expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("options", [TORCH, {"backend": "triton"}], ids=["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_outputs_keep_the_inputs_dtype_unless_told_otherwise(dtype: torch.dtype, options: dict[str, Any]) -> None:
    inputs = random_window("gae", 6, 3, 0, dtype=dtype)
    assert all(x.dtype == dtype for x in run("gae", inputs, **options))
    assert all(x.dtype == torch.float32 for x in run("gae", inputs, out_dtype=torch.float32, **options))


def test_mixed_dtypes_promote(window: dict[str, Any]) -> None:
    mixed = {**window, "values": window["values"].bfloat16()}
    assert kernels.gae(**mixed, **TORCH).advantages.dtype == torch.float32


@pytest.mark.parametrize("options", [TORCH, {"backend": "triton"}], ids=["torch", "triton"])
def test_env_major_inputs_give_env_major_outputs(window: dict[str, Any], options: dict[str, Any]) -> None:
    turned = {
        name: x.t().contiguous().t() if isinstance(x, Tensor) and x.dim() == 2 else x for name, x in window.items()
    }
    assert kernels.gae(**turned, **options).advantages.stride() == (1, 6)


@pytest.mark.parametrize("options", [TORCH, {"backend": "triton"}], ids=["torch", "triton"])
def test_gamma_may_differ_from_env_to_env(window: dict[str, Any], options: dict[str, Any]) -> None:
    gammas = torch.tensor([0.0, 0.5, 1.0])
    together = kernels.gae(**{**window, "gamma": gammas}, **options).advantages
    for env, gamma in enumerate(gammas.tolist()):
        alone = kernels.gae(**{**window, "gamma": gamma}, **options).advantages
        torch.testing.assert_close(together[:, env], alone[:, env], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [TORCH, {"backend": "triton"}], ids=["torch", "triton"])
@every_operation
@pytest.mark.parametrize("shape", [(0, 3), (6, 0)])
def test_a_rollout_without_rows_gives_empty_results(
    operation: str, shape: tuple[int, int], options: dict[str, Any]
) -> None:
    inputs = random_window(operation, 6, 3, 0, filler=False)
    length, envs = shape

    def cut(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x[:envs] if x.dim() == 1 else x[:length, :envs]

    results = run(operation, {name: cut(x) for name, x in inputs.items()}, **options)
    assert results[0].shape == shape


def test_result_types_follow_the_operation(window: dict[str, Any]) -> None:
    assert type(kernels.gae(**window, **TORCH)) is Credit
    assert type(kernels.gae(**window, **TORCH, moments=True)) is CreditWithMoments
    vtrace = random_window("vtrace", 6, 3, 0)
    assert type(kernels.vtrace(**vtrace, **TORCH)) is VTrace
    assert type(kernels.vtrace(**vtrace, **TORCH, moments=True)) is VTraceWithMoments
    assert type(kernels.episodic_prefix_sum(**random_window("episodic_prefix_sum", 6, 3, 0), **TORCH)) is Scan


@pytest.mark.parametrize("options", [TORCH, {"backend": "triton"}], ids=["torch", "triton"])
def test_a_compiled_function_holds_the_operation_as_one_node(window: dict[str, Any], options: dict[str, Any]) -> None:
    def double(rewards: Tensor) -> Tensor:
        return kernels.gae(**{**window, "rewards": rewards}, **options).advantages * 2

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(window["rewards"]), double(window["rewards"]))


def test_the_default_backend_agrees_with_the_reference_where_it_runs(window: dict[str, Any]) -> None:
    backend = "auto" if not torch.cuda.is_available() else "triton"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert_close(run("gae", window, device=device, backend=backend), run_reference("gae", window))
