"""Checks for a machine with one GPU (scripts/gpu_check.sh); elsewhere they are skipped."""

import pytest


def pytest_runtest_setup(item):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
