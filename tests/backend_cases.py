"""Where a kernel with a torch backend runs in tests: torch and the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

BACKENDS = [
    pytest.param("torch", "cpu", id="torch"),
    pytest.param(
        "triton", "cpu", id="interpreted", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="no CPU")
    ),
    pytest.param("triton", "cuda", id="fused", marks=pytest.mark.gpu),
]
every_backend = pytest.mark.parametrize(("backend", "device"), BACKENDS)
