import dataclasses

from torch.utils.tensorboard import SummaryWriter

from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.profile_report import StageProfile
from megatron_dynmo.telemetry.live import live_line
from megatron_dynmo.telemetry.scalars import MigrationTotals, ScalarWriter, profile_scalars

from .test_events import report

LAYOUT = LayerLayout.from_megatron("Et|tL", num_layers=2, num_stages=2)


def test_scalars_of_a_report():
    totals = MigrationTotals()
    totals.add(3_000_000, 20.0)
    totals.add(1_000_000, 10.0)
    scalars = profile_scalars(
        report(),
        LAYOUT,
        predicted_iteration_ms=45.0,
        migrations=totals,
        overhead_ms=0.25,
        active_ranks=2,
    )
    assert scalars == {
        "dynmo/imbalance": 0.11,
        "dynmo/bubble-fraction": 0.1,
        "dynmo/iteration-ms": 50.0,
        "dynmo/stage-forward-ms/stage_0": 12.0,
        "dynmo/stage-backward-ms/stage_0": 20.0,
        "dynmo/stage-busy-ms/stage_0": 32.0,
        "dynmo/bubble-ms/stage_0": 8.0,
        "dynmo/layers/stage_0": 1.0,
        "dynmo/mem-max-allocated-gb/stage_0": 1e-9,
        "dynmo/stage-forward-ms/stage_1": 72.0,
        "dynmo/stage-backward-ms/stage_1": 88.0,
        "dynmo/stage-busy-ms/stage_1": 40.0,
        "dynmo/bubble-ms/stage_1": 0.0,
        "dynmo/layers/stage_1": 1.0,
        "dynmo/mem-max-allocated-gb/stage_1": 2e-9,
        "dynmo/predicted-iteration-ms": 45.0,
        "dynmo/prediction-error-pct": 100 * (45.0 / 50.0 - 1.0),
        "dynmo/migrations": 2.0,
        "dynmo/migrated-mb": 4.0,
        "dynmo/migration-ms": 30.0,
        "dynmo/overhead-pct": 0.5,
        "dynmo/active-gpus": 2.0,
    }


def test_what_is_not_known_is_not_written():
    tags = profile_scalars(report(), LAYOUT)
    assert not any("predict" in tag or "migrat" in tag or "overhead" in tag for tag in tags)


def test_virtual_stages_add_up_on_their_rank():
    layout = LayerLayout.from_megatron("Et||t|L", num_layers=2, num_stages=2)
    stages = tuple(
        StageProfile(pp_rank, vp_stage, 1.0, 2.0, 10.0 + vp_stage, 5.0)
        for pp_rank in range(2)
        for vp_stage in range(2)
    )
    scalars = profile_scalars(dataclasses.replace(report(), stages=stages), layout)
    assert scalars["dynmo/layers/stage_0"] == 2.0
    assert scalars["dynmo/layers/stage_1"] == 0.0
    assert scalars["dynmo/stage-busy-ms/stage_0"] == 21.0
    assert scalars["dynmo/stage-forward-ms/stage_0"] == 16.0


class Wandb:
    def __init__(self):
        self.logged = []

    def log(self, values, step):
        self.logged.append((step, values))


def test_every_writer_gets_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tensorboard, wandb = SummaryWriter(str(tmp_path)), Wandb()
    writer = ScalarWriter([tensorboard, wandb])
    writer.write(40, {"dynmo/imbalance": 0.25})
    writer.write_decision(40, "stay: no gain")
    tensorboard.close()
    assert wandb.logged == [(40, {"dynmo/imbalance": 0.25})]
    read = EventAccumulator(str(tmp_path)).Reload()
    (scalar,) = read.Scalars("dynmo/imbalance")
    assert (scalar.step, scalar.value) == (40, 0.25)
    assert read.Tags()["tensors"] == ["dynmo/decision/text_summary"]


def test_rank_without_writers_writes_nothing():
    ScalarWriter([]).write(1, {"dynmo/imbalance": 0.0})


def test_live_line():
    line = live_line(40, report(), "Et|tL", action="stay", reason="gain 1.0 % is below 2 %")
    assert line == (
        " dynmo iteration     40 | layout Et|tL | stage ms 32/40 | imbalance 11.0 % | "
        "bubble 10.0 % | stay: gain 1.0 % is below 2 %"
    )
    assert live_line(40, report(), "Et|tL").endswith("bubble 10.0 %")


def test_live_line_of_a_long_pipeline_stays_one_line():
    stages = tuple(StageProfile(p, 0, 1.0, 1.0, 20.0 + p, 1.0) for p in range(64))
    line = live_line(7, dataclasses.replace(report(), stages=stages), "E(t|)*63tL")
    assert "stage ms 20..83 (mean 52, most on pp_rank 63)" in line


def test_live_line_shows_digits_of_small_times():
    stages = (StageProfile(0, 0, 0.1, 0.1, 0.256, 0.0), StageProfile(1, 0, 0.1, 0.1, 3.0, 0.0))
    line = live_line(7, dataclasses.replace(report(), stages=stages), "Et|tL")
    assert "stage ms 0.26/3.00" in line
