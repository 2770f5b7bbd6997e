"""The emulation file and what it says of costs, moves and iterations."""

import json
import re
from pathlib import Path

import pytest

from megatron_dynmo.config import DynMoConfig
from megatron_dynmo.cost import (
    ExtraCost,
    LayerCost,
    ModelCosts,
    makespan,
    predict_layout_ms,
)
from megatron_dynmo.cost_file import write_costs
from megatron_dynmo.emulate.emulation_file import emulation_from_json, read_emulation
from megatron_dynmo.emulate.over_time import over_time
from megatron_dynmo.errors import ConfigError
from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.plan import build_plan

DOCS = Path(__file__).parents[2] / "docs" / "emulation.md"
LAYER = {"forward_ms": 1.0, "backward_ms": 2.0}
MINIMAL = {"num_layers": 4, "every_layer": LAYER, "migration": "measured"}


def layout(text, num_layers=4, num_stages=2):
    return LayerLayout.from_megatron(text, num_layers=num_layers, num_stages=num_stages)


class TestOverTime:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (2.5, [2.5, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5]),
            ([1, 2, 4], [1, 2, 4, 4, 4, 4, 4]),
            ({"kind": "step", "from": {"4": 3, "1": 1, "6": 0}}, [1, 1, 1, 3, 3, 0, 0]),
            (
                {
                    "kind": "ramp",
                    "first_iteration": 2,
                    "last_iteration": 6,
                    "before": 5,
                    "after": 1,
                },
                [5, 5, 4, 3, 2, 1, 1],
            ),
            (
                {"kind": "oscillation", "low": 1, "high": 9, "period_iters": 4},
                [1, 1, 9, 9, 1, 1, 9],
            ),
            (
                {"kind": "oscillation", "low": 1, "high": 9, "period_iters": 3},
                [1, 9, 9, 1, 9, 9, 1],
            ),
        ],
    )
    def test_values(self, value, expected):
        found = over_time(value, "x")
        assert [found.at(iteration) for iteration in range(1, 8)] == expected

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("fast", "x is 'fast', must be a finite number of at least 0"),
            (True, "x is True"),
            (-1, "x is -1"),
            (float("nan"), "x is nan"),
            ([], "x is an empty list"),
            ([1, None], "x[1] is None"),
            ({"kind": "sine"}, "x.kind is 'sine', must be one of step, ramp, oscillation"),
            ({"kind": "step"}, "x lacks from"),
            ({"kind": "step", "from": {"2": 1}}, 'begins with "1"'),
            ({"kind": "step", "from": {"1": 1, "b": 1}}, "x.from has 'b'"),
            ({"kind": "step", "from": {"1": -2}}, "x.from.1 is -2"),
            (
                {"kind": "oscillation", "low": 1, "high": 2, "period_iters": 1},
                "x.period_iters is 1, must be at least 2",
            ),
            (
                {"kind": "oscillation", "low": 1, "high": 2, "period_iters": 2.5},
                "x.period_iters is 2.5, must be a whole number",
            ),
            (
                {
                    "kind": "ramp",
                    "first_iteration": 4,
                    "last_iteration": 4,
                    "before": 1,
                    "after": 2,
                },
                "x.last_iteration is 4, must be after first_iteration, which is 4",
            ),
        ],
    )
    def test_mistakes_are_named(self, value, message):
        with pytest.raises(ConfigError, match=re.escape(message)):
            over_time(value, "x")

    def test_a_speed_is_above_zero(self):
        with pytest.raises(ConfigError, match=re.escape("x is 0, must be a finite number above 0")):
            over_time(0, "x", is_positive=True)


class TestFile:
    def test_rows_replace_what_every_layer_has(self):
        emulation = emulation_from_json(
            MINIMAL | {"layers": [{"layer_number": 2, "backward_ms": 7.0, "scale": 2}]}
        )
        costs = emulation.costs(1, 8)
        times = [(layer.forward_ms, layer.backward_ms) for layer in costs.layers]
        assert times == [(1, 2), (2, 14), (1, 2), (1, 2)]
        assert costs.num_microbatches == 8 and costs.p2p_ms == 0.0

    def test_takes_costs_json_as_a_base(self, tmp_path):
        costs = ModelCosts(
            layers=(LayerCost(1, 1.0, 2.0, 100), LayerCost(2, 3.0, 4.0, 200, optimizer_ms=5.0)),
            first_stage_extra=ExtraCost(0.5, 0.25),
            num_microbatches=3,
            p2p_ms=0.125,
        )
        write_costs(tmp_path / "costs.json", costs)
        file = tmp_path / "emulation.json"
        file.write_text(
            json.dumps(
                {
                    "costs": "costs.json",
                    "layers": [{"layer_number": 1, "forward_ms": 9.0}],
                    "migration": {"bandwidth_gb_s": 1, "rebuild_ms": 0},
                }
            )
        )
        found = read_emulation(file).costs(1, 3)
        assert found.layers[0] == LayerCost(1, 9.0, 2.0, 100)
        assert found.layers[1] == costs.layers[1]
        assert found.first_stage_extra == costs.first_stage_extra
        assert found.p2p_ms == 0.125

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"layer": []}, "the document has unknown layer; known: migration, costs, num_layers"),
            ({"num_layers": 0}, "num_layers is 0, must be a whole number above 0"),
            ({"num_layers": None}, "num_layers is None"),
            ({"layers": {}}, "layers must be a list, is dict"),
            ({"layers": [{}]}, "layers[0] lacks layer_number"),
            ({"layers": [{"layer_number": 5}]}, "layers[0].layer_number is 5, must be from 1 to 4"),
            ({"layers": [{"layer_number": 1, "ms": 1}]}, "layers[0] has unknown ms"),
            ({"every_layer": {"memory_bytes": 1.5}}, "every_layer.memory_bytes is 1.5"),
            ({"first_stage_extra": {"forward_ms": "1"}}, "first_stage_extra.forward_ms is '1'"),
            ({"optimizer_ms": -1}, "optimizer_ms is -1"),
            ({"speeds": [1]}, "speeds must be an object of pp_rank: speed, is list"),
            ({"speeds": {"last": 1}}, "speeds has 'last', must be a pp_rank such as 0"),
            ({"speeds": {"1": 0}}, "speeds.1 is 0, must be a finite number above 0"),
            ({"link": {"bandwidth_gb_s": 0}}, "link.bandwidth_gb_s is 0"),
            ({"link": {"message_bytes": 8}}, "link.message_bytes needs link.bandwidth_gb_s"),
            ({"migration": "free"}, "migration is 'free', must be \"measured\" or an object"),
            ({"migration": {"rebuild_ms": 1}}, "migration lacks bandwidth_gb_s"),
            (
                {"migration": {"bandwidth_gb_s": 1, "rebuild_ms": 1}},
                "migration.bandwidth_gb_s needs the memory_bytes of every layer; layers [1, 2, 3",
            ),
        ],
    )
    def test_mistakes_are_named(self, changes, message):
        with pytest.raises(ConfigError, match=re.escape(message)):
            emulation_from_json(MINIMAL | changes)

    def test_a_file_without_migration_or_layers_is_refused(self):
        with pytest.raises(ConfigError, match="the document lacks migration"):
            emulation_from_json({"num_layers": 1})
        with pytest.raises(ConfigError, match="give num_layers, or costs"):
            emulation_from_json({"migration": "measured"})

    def test_the_documented_example_is_valid(self):
        (example,) = re.findall(r"```json\n(.*?)```", DOCS.read_text(), re.DOTALL)
        emulation = emulation_from_json(json.loads(example))
        assert emulation.costs(60, 1).layers[2].forward_ms == 4.0
        assert [emulation.speed(5, iteration) for iteration in (29, 30, 60)] == [1.0, 0.5, 1.0]


class TestFlag:
    def test_a_wrong_file_is_a_mistake_in_the_flag(self, tmp_path):
        with pytest.raises(ConfigError, match="cannot read the emulation from"):
            DynMoConfig(emulate=str(tmp_path / "absent.json"))
        broken = tmp_path / "broken.json"
        broken.write_text("{")
        with pytest.raises(ConfigError, match=re.escape(f"{broken} is not JSON")):
            DynMoConfig(emulate=str(broken))

    def test_needs_our_patches(self, tmp_path):
        file = tmp_path / "emulation.json"
        file.write_text(json.dumps(MINIMAL))
        assert DynMoConfig(emulate=str(file)).emulate == str(file)
        with pytest.raises(ConfigError, match="--dynmo-emulate needs --dynmo-mode observe or"):
            DynMoConfig(mode="off", emulate=str(file))

    def test_is_off_by_default(self):
        assert DynMoConfig().emulate is None


class TestPrediction:
    def test_agrees_with_the_makespan(self):
        found = emulation_from_json(MINIMAL).predict_ms(layout("Ett|ttL"), 1, 6)
        assert found == makespan("1f1b", [2.0, 2.0], [4.0, 4.0], 6)

    @pytest.mark.parametrize("text", ["Et*3|tL", "Et|t|t|tL"])
    def test_agrees_with_the_prediction_of_the_same_costs(self, text):
        document = MINIMAL | {
            "every_layer": LAYER | {"reduce_ms": 0.5, "optimizer_ms": 0.25},
            "last_stage_extra": {"forward_ms": 1.0, "optimizer_ms": 3.0},
            "speeds": {"1": 0.5},
            "link": {"latency_ms": 0.25, "bandwidth_gb_s": 0.001},
        }
        emulation = emulation_from_json(document)
        costs = emulation.costs(1, 4, num_bytes=500)
        assert costs.p2p_ms == 0.75
        expected = predict_layout_ms(costs, layout(text), stage_speeds=[1.0, 0.5])
        assert emulation.predict_ms(layout(text), 1, 4, 500) == expected

    def test_the_ranks_own_optimizer_step_is_added(self):
        plain = emulation_from_json(MINIMAL)
        with_step = emulation_from_json(MINIMAL | {"optimizer_ms": 8, "speeds": {"0": 2.0}})
        faster = emulation_from_json(MINIMAL | {"speeds": {"0": 2.0}})
        text = layout("Ett|ttL")
        assert with_step.predict_ms(text, 1, 4) == faster.predict_ms(text, 1, 4) + 8.0
        assert faster.predict_ms(text, 1, 4) < plain.predict_ms(text, 1, 4)

    def test_stated_message_size_replaces_the_real_one(self):
        link = {"bandwidth_gb_s": 1, "message_bytes": 3_000_000}
        assert emulation_from_json(MINIMAL | {"link": link}).costs(1, 1, 64).p2p_ms == 3.0


class TestMoves:
    DOCUMENT = MINIMAL | {
        "every_layer": LAYER | {"memory_bytes": 1_000_000},
        "layers": [{"layer_number": 3, "memory_bytes": 5_000_000}],
        "migration": {"bandwidth_gb_s": 2.0, "rebuild_ms": 10.0},
    }

    @pytest.mark.parametrize(
        ("old", "new", "num_stages", "expected"),
        [
            ("Ett|ttL", "Et|tttL", 2, 10.0 + 0.5),
            ("Ettt|tL", "Et|tttL", 2, 10.0 + 3.0),
            # Rank 1 sends layer 3 while it receives layer 2: directions do not add up.
            ("Ett|t|tL", "Et|t|ttL", 3, 10.0 + 2.5),
            # Layer 3 only changes its chunk on its rank.
            ("Et|t|t|tL", "Ettt|||tL", 2, 10.0 + 0.5),
        ],
    )
    def test_cost_is_that_of_the_busiest_direction(self, old, new, num_stages, expected):
        emulation = emulation_from_json(self.DOCUMENT)
        plan = build_plan(layout(old, 4, num_stages), layout(new, 4, num_stages))
        assert emulation.move_ms(plan) == expected
