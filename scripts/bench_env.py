"""Raw env steps per second with random actions: no policy, no update, valid steps only.

Examples:
    python scripts/bench_env.py --env Ant --num-envs 1024 4096 --pools 1 2 --num-threads 0 1 2
    python scripts/bench_env.py --engine mujoco_warp --device cuda --captured random --option physics=rk4 physics=euler

Lists multiply, and each row runs in a process of its own, so that its memory is its own. The pools take turns;
`--policy-ms` sleeps between a pool's recv and its next send, as long as a policy on an accelerator would take for it,
which shows what several pools are good for.

Engines on the GPU are measured with `--captured random` (one CUDA graph of several steps with precomputed actions) or
`--captured policy` (the graph holds a 256-128-64 network that acts on the observations, too). `rss_growth_mib` and
`gpu_growth_mib` are what the process and the GPU took more after all windows than after the first one, `env_steps`
steps of every env earlier; keep the GPU to yourself for the latter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a checkout runs without being installed

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import batch_space

import envs
from scripts.provenance import append_rows, format_table, provenance

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "envs.csv"
PACKAGES = {
    "envpool": ("envpool",),
    "gymnasium": ("gymnasium",),
    "mujoco_warp": ("mujoco-warp", "warp-lang"),
    "torch": (),
}
#: Steps every pool and adds the valid rows to a counter (a fresh one if None), which it returns.
Advance = Callable[[torch.Tensor | None], torch.Tensor]
ACTION_BATCHES = 8  # precomputed and reused in turn, so that drawing them costs nothing


@dataclass(frozen=True)
class Case:
    """One row to measure; ``options`` go to the engine as they are."""

    env: str
    engine: str
    num_envs: int
    device: str
    captured: str
    seconds: float
    windows: int
    policy_ms: float
    options: dict[str, Any]


def random_actions(space: gymnasium.Space[Any], num_envs: int, device: torch.device) -> list[torch.Tensor]:
    """`ACTION_BATCHES` batches ``[num_envs, *shape]``, uniform in the space or, where unbounded, standard normal."""
    batch = batch_space(space, num_envs)
    batch.seed(0)
    dtype = torch.int64 if isinstance(space, gymnasium.spaces.Discrete) else torch.float32
    return [torch.from_numpy(batch.sample()).to(device, dtype) for _ in range(ACTION_BATCHES)]


def measure(case: Case) -> dict[str, str | int | float]:
    """Build the env, step it for ``windows`` windows after one of warm-up, and return the row."""
    started = time.perf_counter()
    env = envs.make(case.env, case.engine, case.num_envs, device=case.device, **case.options)
    env.reset()
    start_seconds = time.perf_counter() - started
    actions = random_actions(env.single_action_space, case.num_envs, env.device)
    advance = (
        capture(env, actions, case.captured) if case.captured != "no" else take_turns(env, actions, case.policy_ms)
    )
    timed_window(advance, case.seconds)
    first_resident, first_gpu = resident_mib(), gpu_used_mib(env.device)
    windows = [timed_window(advance, case.seconds) for _ in range(case.windows)]
    resident, gpu = resident_mib(), gpu_used_mib(env.device)
    env.close()
    p20, p50, p80 = (float(np.quantile([steps / seconds for steps, seconds in windows], q)) for q in (0.2, 0.5, 0.8))
    return {
        "engine": case.engine,
        "env": env.id,
        "num_envs": case.num_envs,
        "pools": len(env.pools),
        "options": json.dumps(case.options),
        "device": str(env.device),
        "captured": case.captured,
        "policy_ms": case.policy_ms,
        "steps_per_second": round(p50),
        "p20": round(p20),
        "p80": round(p80),
        "start_seconds": round(start_seconds, 2),
        "rss_mib": round(resident),
        "gpu_mib": round(gpu),
        "env_steps": sum(steps for steps, _ in windows) // case.num_envs,
        "rss_growth_mib": round(resident - first_resident, 1),
        "gpu_growth_mib": round(gpu - first_gpu, 1),
    }


def measure_with_source(case: Case) -> tuple[dict[str, str | int | float], dict[str, str | int]]:
    """The row, and where it comes from; asked for here, for a GPU context of the parent would be in ``gpu_mib``."""
    return measure(case), provenance(PACKAGES[case.engine])


def take_turns(env: envs.VecEnv, actions: list[torch.Tensor], policy_ms: float) -> Advance:
    """Steps every pool once per call, in turns; every pool has a step under way before and after a call."""
    batches = itertools.cycle([[batch[columns] for columns in env.pools] for batch in actions])
    for pool, batch in enumerate(next(batches)):
        env.send(pool, batch)

    def advance(valid_steps: torch.Tensor | None) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.int64, device=env.device) if valid_steps is None else valid_steps
        for pool, batch in enumerate(next(batches)):
            total += env.recv(pool).valid.sum()
            if policy_ms:
                time.sleep(policy_ms / 1e3)
            env.send(pool, batch)
        return total

    return advance


def capture(env: envs.VecEnv, actions: list[torch.Tensor], mode: str) -> Advance:
    """Replays one CUDA graph of `ACTION_BATCHES` steps per call; in mode ``policy`` a network chooses the actions."""
    if not env.capturable or env.device.type != "cuda":
        raise envs.EnvError(f"--captured {mode}: {env.engine} on {env.device} cannot be captured in a CUDA graph")
    network = random_policy(env) if mode == "policy" else None
    observations = env.reset().clone()
    total = torch.zeros((), dtype=torch.int64, device=env.device)

    def steps() -> None:
        for batch in actions:
            env.send(0, batch if network is None else network(observations))
            step = env.recv(0)
            observations.copy_(step.observations)
            total.add_(step.valid.sum())

    stream = torch.cuda.Stream(env.device)
    stream.wait_stream(torch.cuda.current_stream(env.device))
    with torch.no_grad(), torch.cuda.stream(stream):
        steps()  # warm-up outside of the graph
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            steps()
    torch.cuda.synchronize(env.device)
    replays = itertools.cycle([torch.cuda.Event(), torch.cuda.Event()])

    def advance(valid_steps: torch.Tensor | None) -> torch.Tensor:
        if valid_steps is None:
            total.zero_()
        replayed = next(replays)
        replayed.synchronize()  # of the replay before the last: launches stay no further ahead than that
        graph.replay()
        replayed.record()
        return total

    return advance


def random_policy(env: envs.VecEnv) -> Callable[[torch.Tensor], torch.Tensor]:
    """An untrained 256-128-64 network with the mode of its output as the action."""
    space = env.single_action_space
    discrete = isinstance(space, gymnasium.spaces.Discrete)
    outputs = int(space.n) if discrete else int(np.prod(space.shape or ()))
    widths = [int(np.prod(env.single_observation_space.shape or ())), 256, 128, 64, outputs]
    layers = [part for a, b in itertools.pairwise(widths) for part in (torch.nn.Linear(a, b), torch.nn.ELU())][:-1]
    network = torch.nn.Sequential(*layers).to(env.device)
    if discrete:
        return lambda observations: network(observations.flatten(1)).argmax(-1)
    return lambda observations: network(observations.flatten(1)).view(-1, *(space.shape or ()))


def timed_window(advance: Advance, seconds: float) -> tuple[int, float]:
    """Valid steps and seconds of a window of about ``seconds``, which ends when the device has done all of it."""
    started = time.perf_counter()
    total = advance(None)
    while time.perf_counter() - started < seconds:
        total = advance(total)
    return int(total), time.perf_counter() - started


def gpu_used_mib(device: torch.device) -> float:
    """Memory in use on the GPU by all processes, MiB; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**20


def resident_mib() -> float:
    """Resident memory of this process, MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def parse_arguments() -> argparse.Namespace:
    """Read the command line; lists multiply."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=["Ant"], help="names or exact ids")
    parser.add_argument("--engine", default="envpool", choices=list(envs.ENGINES))
    parser.add_argument("--num-envs", nargs="+", type=int, default=[1024])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pools", nargs="+", type=int, help="envpool and gymnasium only")
    parser.add_argument("--num-threads", nargs="+", type=int, help="as env.num_threads")
    parser.add_argument(
        "--option", nargs="*", default=[], metavar="KEY=VALUE", help="further options; a key given twice is swept over"
    )
    parser.add_argument(
        "--captured", nargs="+", default=["no"], choices=["no", "random", "policy"], help="engines on the GPU only"
    )
    parser.add_argument("--policy-ms", nargs="+", type=float, default=[0.0], help="pause per pool and step")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of a window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--no-save", action="store_true", help=f"print only; do not append to {RESULTS.name}")
    return parser.parse_args()


def cases(arguments: argparse.Namespace) -> list[Case]:
    """The product of all lists given on the command line."""
    swept = {"pools": arguments.pools, "num_threads": arguments.num_threads}
    swept = {key: values for key, values in swept.items() if values}
    for key, _, text in (option.partition("=") for option in arguments.option):
        swept.setdefault(key, []).append(option_value(text))
    return [
        Case(
            env,
            arguments.engine,
            num_envs,
            arguments.device,
            captured,
            arguments.seconds,
            arguments.windows,
            policy_ms,
            dict(zip(swept, values, strict=True)),
        )
        for env in arguments.env
        for values in itertools.product(*swept.values())
        for num_envs in arguments.num_envs
        for captured in arguments.captured
        for policy_ms in arguments.policy_ms
    ]


def option_value(text: str) -> Any:
    """A value given as JSON, or the text itself where it is none: ``200``, ``false``, ``[0.2, 1]``, ``euler``."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def main() -> None:
    """Measure case by case; each row is printed and appended to the results as soon as it is there."""
    arguments = parse_arguments()
    context = multiprocessing.get_context("fork")  # nothing is imported again, and this process holds no env or GPU
    for case in cases(arguments):
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            try:
                row, source = executor.submit(measure_with_source, case).result()
            except envs.EnvError as error:
                sys.exit(str(error))
        print(format_table([row], row), flush=True)
        if not arguments.no_save:
            append_rows(RESULTS, [{**row, **source}])


if __name__ == "__main__":
    main()
