"""Scripts that measure a GPU: where there is none they say so in one line."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from scripts import bench_loss, update_roofline


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize("script", [bench_loss, update_roofline], ids=["bench_loss", "update_roofline"])
def test_a_script_that_measures_a_gpu_says_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: ModuleType
):
    monkeypatch.setattr(sys, "argv", ["a_script.py"])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("error: a_script.py measures a CUDA device, and torch ")
