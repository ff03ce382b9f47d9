"""Who may import whom: kernels stand alone, envs know no trainer, and heavy or optional packages have one door."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "envs", "trainer")


class Import(NamedTuple):
    """One import statement."""

    file: str  #: relative to the repository
    package: str  #: the top-level package
    module: str
    at_top: bool  #: outside of any function


def _imports(path: Path) -> list[Import]:
    tree = ast.parse(path.read_text())
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        file = path.relative_to(ROOT).as_posix()
        found += [Import(file, name.partition(".")[0], name, id(node) not in inside) for name in names]
    return found


IMPORTS = [i for folder in (*PACKAGES, "scripts") for path in (ROOT / folder).rglob("*.py") for i in _imports(path)]


def importers(package: str, folders: tuple[str, ...] = PACKAGES) -> set[str]:
    return {i.file for i in IMPORTS if i.package == package and i.file.split("/")[0] in folders}


def test_only_triton_files_import_triton():
    assert all(Path(file).name.startswith("triton_") for file in importers("triton"))


def test_only_the_metrics_file_imports_wandb_and_only_inside_a_function():
    users = [i for i in IMPORTS if i.package == "wandb"]
    assert {i.file for i in users} == {"trainer/metrics.py"}
    assert not any(i.at_top for i in users)


@pytest.mark.parametrize("package", ["hydra", "omegaconf", "yaml"])
def test_only_the_schema_and_scripts_know_hydra(package: str):
    assert importers(package) == {"trainer/schema.py"}


def test_kernels_know_neither_trainer_nor_envs():
    third_party = {i.package for i in IMPORTS if i.file.startswith("kernels/")} - set(sys.stdlib_module_names)
    assert third_party <= {"kernels", "torch", "triton", "numpy"}


def test_envs_know_neither_trainer_nor_kernels():
    assert not {i.package for i in IMPORTS if i.file.startswith("envs/")} & {"trainer", "kernels", "scripts"}


def test_the_trainer_does_not_know_the_scripts():
    assert importers("scripts") == set()


@pytest.mark.parametrize("package", ["envpool", "mujoco_warp", "warp"])
def test_each_engine_is_known_to_its_own_files_only(package: str):
    assert all(file.startswith("envs/") for file in importers(package))


def test_the_algorithms_do_not_import_each_other():
    algorithms = {"trainer/ppo.py": "trainer.impala", "trainer/impala.py": "trainer.ppo"}
    assert not any(i.module == algorithms.get(i.file) for i in IMPORTS)


def test_kernels_and_trainer_load_without_optional_packages():
    """wandb, EnvPool, MuJoCo Warp and imageio may be absent until they are asked for."""
    program = (
        "import sys\n"
        "for name in ('wandb', 'envpool', 'mujoco_warp', 'warp', 'imageio', 'matplotlib', 'pandas', 'onnx'):\n"
        "    sys.modules[name] = None\n"
        "import kernels, envs, trainer.session, trainer.evaluate\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
