"""A new optimizer gets the masters that exist, by the very words in which Megatron makes them."""

import pytest
import torch

from megatron_dynmo.adapters.kept_masters import KeptMasters
from megatron_dynmo.adapters.optimizer import MAIN, ParamState


def param_and_master(dtype, shard=None):
    param = torch.nn.Parameter(torch.randn(4, 6).to(dtype))
    start, end = shard or (0, param.numel())
    master = torch.randn(end - start)
    return param, master, ParamState({MAIN: master}, shard=shard)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_master_is_handed_over_and_nothing_is_copied(dtype):
    param, master, state = param_and_master(dtype)
    with KeptMasters([(param, state)]):
        made = param.detach().clone().float()
    assert made.data_ptr() == master.data_ptr()
    assert made.shape == param.shape


def test_so_is_that_of_a_shard_and_of_no_other():
    param, master, state = param_and_master(torch.bfloat16, (5, 17))
    with KeptMasters([(param, state)]):
        flat = param.detach().view(-1)
        mine, other = (flat[a:b].clone().float() for a, b in ((5, 17), (0, 5)))
    assert mine.data_ptr() == master.data_ptr() and mine.shape == (12,)
    assert torch.equal(other, param.detach().view(-1)[:5].float())
    assert other.data_ptr() != param.data_ptr()


def test_everything_else_is_left_alone():
    param, _, state = param_and_master(torch.bfloat16)
    full = torch.nn.Parameter(torch.randn(3))
    unknown = torch.nn.Parameter(torch.randn(4, 6).bfloat16())
    with KeptMasters([(param, state), (full, ParamState())]):
        for other in (full, unknown):
            copy = other.detach().clone().float()
            assert torch.equal(copy, other.float()) and copy.data_ptr() != other.data_ptr()
    outside = param.detach().clone().float()
    assert torch.equal(outside, param.float())
