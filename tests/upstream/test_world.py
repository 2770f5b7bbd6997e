"""What is asked of a run before its ranks may leave."""

from argparse import Namespace

import pytest

from megatron_dynmo.adapters.world import require_reformable, require_resumable
from megatron_dynmo.errors import ConfigError


def test_groups_must_be_megatrons_and_nothing_may_count_on_all_ranks():
    def form(store):
        raise AssertionError("only looked at")

    assert require_reformable(Namespace(), form) is form
    with pytest.raises(ConfigError, match="makes its process groups itself"):
        require_reformable(Namespace(), None)
    with pytest.raises(ConfigError, match=r"packed away with --use-sharp.* leave it out"):
        require_reformable(Namespace(use_sharp=True), form)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"load": None}, "--save and --load the same folder .they are /a and None"),
        ({"load": "/b"}, "they are /a and /b"),
        ({"finetune": True}, "leave --finetune out"),
        ({"ckpt_step": 0}, "leave --ckpt-step out"),
        ({"override_ckpt_iteration": 7}, "leave --override-ckpt-iteration out"),
        ({"no_load_optim": True}, "leave --no-load-optim out"),
        ({"no_save_optim": True}, "leave --no-save-optim out"),
        ({"no_load_rng": True}, "leave --no-load-rng out"),
        ({"no_save_rng": True}, "leave --no-save-rng out"),
        ({"ckpt_format": "torch"}, "--ckpt-format torch cannot, use torch_dist"),
        ({"use_distributed_optimizer": True}, "add --dist-ckpt-optim-fully-reshardable"),
    ],
)
def test_a_run_that_is_started_anew_must_resume(changed, said):
    args = {
        "save": "/a",
        "load": "/a",
        "finetune": False,
        "no_load_rng": None,
        "ckpt_format": "torch_dist",
        "use_distributed_optimizer": False,
        "dist_ckpt_optim_fully_reshardable": False,
    }
    require_resumable(Namespace(**args))
    with pytest.raises(ConfigError, match=said):
        require_resumable(Namespace(**args | changed))
