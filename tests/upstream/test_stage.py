"""What `MegatronStage` checks by itself, on a chunk without a model around it."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dynmo.adapters.stage import MegatronStage, _Incoming
from megatron_dynmo.errors import ConservationError, MigrationError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.plan import LayerMove


class _Layer(torch.nn.Module):
    """A layer whose module keeps extra state, as those for FP8 do."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.scale = torch.full((4,), float(number))

    def get_extra_state(self) -> torch.Tensor:
        return self.scale

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scale = state


def _stage(pp_rank: int, *numbers: int) -> MegatronStage:
    layers = [_Layer(number) for number in numbers]
    stage = MegatronStage.__new__(MegatronStage)
    stage._topology = SimpleNamespace(pp_rank=pp_rank)
    stage.chunks = [SimpleNamespace(vp_stage=0, layers=layers, layer_numbers=list(numbers))]
    stage._codec = SimpleNamespace(capture=lambda param: None)
    stage._pending = SimpleNamespace(incoming={2: _Incoming(_Layer(2))})
    return stage


def test_extra_state_that_is_damaged_on_its_way_is_refused_before_anything_changes():
    parcel = _stage(0, 1, 2).parcel(2)
    target = _stage(1, 3)
    move = LayerMove(2, 0, 0, 1, 0)
    target.accept(move, parcel)
    parcel.tensors["extra/_extra_state"] = parcel.tensors["extra/_extra_state"].clone()
    parcel.tensors["extra/_extra_state"].view(torch.int32)[2] ^= 1
    with pytest.raises(MigrationError, match="extra state of layer 2 changed on its way"):
        target.accept(move, parcel)


@pytest.mark.parametrize("held", [(2,), (2, 3, 4), (3, 2), ()])
def test_a_rank_that_holds_other_layers_than_the_plan_says_so(held):
    layout = LayerLayout.from_megatron("Et|ttL", num_layers=3, num_stages=2)
    _stage(1, 2, 3).check_ownership(layout)
    with pytest.raises(
        ConservationError, match=r"virtual stage 0 holds layers .*plan was \[2, 3\]"
    ):
        _stage(1, *held).check_ownership(layout)
