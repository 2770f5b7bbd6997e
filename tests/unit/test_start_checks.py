"""What is refused before anything is built: batches that do not divide, splits of no document."""

import struct
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dynmo.adapters.batch_checks import require_legal_batches
from megatron_dynmo.adapters.split_check import require_documents
from megatron_dynmo.errors import ConfigError


def arguments(**given) -> Namespace:
    defaults = {
        "world_size": 2,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "step_batch_size_schedule": None,
        "decrease_batch_size_if_needed": False,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "microbatch_group_size_per_vp_stage": None,
    }
    return Namespace(**{**defaults, **given})


def virtual(**given) -> Namespace:
    return arguments(
        pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1, **given
    )


class TestBatches:
    @pytest.mark.parametrize(
        "args",
        [
            arguments(),
            arguments(global_batch_size=None),
            arguments(global_batch_size=6, micro_batch_size=3),
            arguments(global_batch_size=3, decrease_batch_size_if_needed=True),
            arguments(world_size=3, pipeline_model_parallel_size=2, global_batch_size=5),
            virtual(global_batch_size=2),
            virtual(global_batch_size=4),
            virtual(global_batch_size=5, microbatch_group_size_per_vp_stage=3),
        ],
    )
    def test_what_megatron_can_train_passes(self, args):
        require_legal_batches(args)

    def test_the_flags_that_the_user_gave_are_named(self):
        with pytest.raises(ConfigError) as error:
            require_legal_batches(arguments(global_batch_size=3))
        assert str(error.value) == (
            "--global-batch-size 3 is not a multiple of --micro-batch-size 1 times 2 data-parallel "
            "replicas (= 2); try 2 or 4"
        )

    def test_nothing_smaller_is_offered_than_one_micro_batch_each(self):
        with pytest.raises(ConfigError, match=r"\(= 8\); try 8$"):
            require_legal_batches(arguments(global_batch_size=3, micro_batch_size=4))

    @pytest.mark.parametrize(("size", "near"), [(1, "2"), (3, "2 or 4"), (5, "4 or 6")])
    def test_virtual_stages_need_whole_groups(self, size, near):
        with pytest.raises(ConfigError, match=rf"M is {size}; try --global-batch-size {near}$"):
            require_legal_batches(virtual(global_batch_size=size))

    def test_what_is_offered_is_legal(self):
        for size in range(2, 40, 2):
            for group in (2, 3, 5):
                given = {"microbatch_group_size_per_vp_stage": group, "world_size": 4}
                try:
                    require_legal_batches(virtual(global_batch_size=size, **given))
                except ConfigError as error:
                    offers = str(error).rsplit(" try ", 1)[1].removeprefix("--global-batch-size ")
                    for offer in offers.split(" or "):
                        require_legal_batches(virtual(global_batch_size=int(offer), **given))


@pytest.fixture
def data(tmp_path: Path):
    def make(name: str, num_documents: int) -> str:
        header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, num_documents, num_documents + 1)
        (tmp_path / f"{name}.idx").write_bytes(header)
        return str(tmp_path / name)

    return make


def split_config(prefixes, split, weights=None):
    shares = [float(share) for share in split.split(",")]
    bounds, begin = [], 0.0
    for share in shares:
        end = begin + share / sum(shares)
        bounds.append((begin, end) if share else None)
        begin = end
    return SimpleNamespace(mock=False, blend=(prefixes, weights), split=split, split_matrix=bounds)


class TestSplit:
    @pytest.mark.parametrize(
        ("num_documents", "split", "fixed", "parts"),
        [
            (11, "98,1,1", "98,0,0", "validation and test"),
            (11, "90,8,2", "90,8,0", "test"),
            (300, "969,30,1", "969,30,0", "test"),
            (3, "1,1,98", "100,0,0", "training and validation"),
        ],
    )
    def test_a_part_without_documents_is_refused(self, data, num_documents, split, fixed, parts):
        config = split_config([data("a", num_documents)], split)
        with pytest.raises(ConfigError) as error:
            require_documents(config, [24, 0, 0])
        text = str(error.value)
        assert f"--split {split} leaves no document of {config.blend[0][0]}" in text
        assert f"(it has {num_documents}) for {parts}" in text
        assert f"use --split {fixed}, or data" in text
        require_documents(split_config(config.blend[0], fixed), [24, 0, 0])

    def test_each_member_of_a_weighted_blend_counts(self, data):
        big, small = data("big", 1000), data("small", 5)
        with pytest.raises(ConfigError, match="small"):
            require_documents(split_config([big, small], "98,1,1", [0.3, 0.7]), [24, 4, 4])

    def test_an_unweighted_blend_takes_each_document_once_and_ends(self, data):
        config = split_config([data("big", 1000), data("small", 5)], "98,1,1")
        require_documents(config, [24, 4, 4])

    def test_one_pass_over_nothing_ends(self, data):
        require_documents(split_config([data("a", 11)], "98,1,1"), [None, None, None])

    def test_enough_documents_pass(self, data):
        require_documents(split_config([data("a", 200)], "98,1,1"), [24, 4, 4])

    def test_data_that_is_not_on_this_machine_is_left_to_megatron(self):
        require_documents(split_config(["s3://bucket/a"], "98,1,1"), [24, 4, 4])

    def test_empty_data(self, data):
        with pytest.raises(ConfigError, match="holds no document"):
            require_documents(split_config([data("a", 0)], "1,0,0"), [24, 0, 0])
