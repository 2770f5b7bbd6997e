"""Every place that holds an old group gets the new one, and none is overlooked in silence."""

from tests.ranks import run_ranks


def replaced(rank, world_size):
    import pytest
    import torch
    import torch.distributed as dist

    from megatron_dynmo.adapters.process_groups import replace_groups
    from megatron_dynmo.adapters.topology import Topology
    from megatron_dynmo.errors import MigrationError

    old = {name: dist.new_group([0]) for name in ("tp", "pp", "gone")}
    new = {name: dist.new_group([0]) for name in ("tp", "pp")}
    # Two names may mean one group, of which only one has a successor.
    old["alias"] = old["pp"]

    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tp_group = old["tp"]
            self.groups = {"pp": [old["pp"], "text"]}
            self.size = 3

    model = torch.nn.Sequential(Holder(), Holder())
    # Frozen, and of this package; seen twice, through two holders.
    place = Topology(
        rank=0,
        world_size=1,
        pp_rank=0,
        pp_size=1,
        virtual_stages=1,
        tp_size=1,
        token_exchange_size=1,
        pp_group=old["pp"],
        tp_group=old["tp"],
        token_exchange_group=old["tp"],
        pp_global_ranks=(0,),
        device=torch.device("cpu"),
    )
    model[0].place = model[1].place = place
    assert replace_groups([[model]], old, new) == 7
    assert model[1].tp_group is new["tp"] and model[1].groups["pp"][0] is new["pp"]
    assert place.pp_group is new["pp"] and place.tp_group is new["tp"]
    assert replace_groups([[model]], old, new) == 0
    for lost in (old["gone"], (old["tp"],)):
        model[0].other = lost
        with pytest.raises(MigrationError, match="no successor or cannot be replaced"):
            replace_groups([model], old, new)
    return True


def test_groups_are_replaced_everywhere():
    assert run_ranks(replaced, 1) == [True]
