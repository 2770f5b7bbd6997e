"""What `dynmo plan` shows to people."""

from rich.console import Console
from rich.table import Table

from megatron_dynmo.layout import LayerLayout
from megatron_dynmo.planner.layout_report import LayoutReport
from megatron_dynmo.planner.report import MIN_GAIN_PCT, Plan

__all__ = ["print_check", "print_plan"]


def print_plan(console: Console, plan: Plan, unit: str, findings: list[str]) -> None:
    """Print the best layout, what it brings, and what would help.

    Args:
        console: Where to print.
        plan: The plan.
        unit: Of times.
        findings: Lines of advice.
    """
    best, current = plan.best, plan.current
    console.print(f"layout {best.layout}")
    console.print(_table(best, unit))
    console.print(
        f"iteration {_number(best.iteration_ms)} {unit}, at least "
        f"{_number(plan.lower_bound_ms)} whatever the layout; "
        f"bubble {best.bubble_fraction:.1%}, imbalance {best.imbalance:.1%}"
    )
    console.print(
        f"slowest stage {_number(best.slowest_ms)} {unit} a micro-batch, at least "
        f"{_number(plan.stage_bound_ms)} with whole layers"
    )
    against = f"{plan.current_name} {current.layout}"
    console.print(
        f"{against}: iteration {_number(current.iteration_ms)} {unit}, slowest stage "
        f"{_number(current.slowest_ms)}, imbalance {current.imbalance:.1%}"
    )
    if plan.is_worth_it:
        console.print(
            f"gain {plan.gain_pct:.1f} %: --pipeline-model-parallel-layout '{best.layout}'"
        )
    else:
        console.print(
            f"nothing to gain: {plan.gain_pct:.1f} % is below {MIN_GAIN_PCT:g} %, stay with "
            f"{against}"
        )
    for finding in findings:
        console.print(f"note: {finding}")


def print_check(console: Console, report: LayoutReport, unit: str | None) -> None:
    """Print that a layout is legal, and what each stage gets.

    Args:
        console: Where to print.
        report: The layout.
        unit: Of times; None where only layers are known.
    """
    layout = report.layout
    chunks = f" x {layout.virtual_stages} virtual" if layout.virtual_stages > 1 else ""
    mtp = f" and {layout.mtp_num_layers} MTP" if layout.mtp_num_layers else ""
    console.print(
        f"legal: {layout} places {layout.num_layers} layers{mtp} on {layout.num_stages} "
        f"stages{chunks}"
    )
    console.print(_table(report, unit))


def _table(report: LayoutReport, unit: str | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("stage", justify="right")
    table.add_column("layers", justify="right")
    chunked = report.layout.virtual_stages > 1
    if chunked:
        table.add_column("of them", no_wrap=True)
    if unit is not None:
        table.add_column(f"forward {unit}", justify="right")
        table.add_column(f"backward {unit}", justify="right")
    table.add_column("share", justify="right")
    has_memory = unit is not None and any(rank.memory_bytes for rank in report.ranks)
    if has_memory:
        table.add_column("memory GB", justify="right")
        table.add_column("in flight GB", justify="right")
    for rank in report.ranks:
        row = [str(rank.pp_rank), str(rank.num_layers)]
        if chunked:
            row.append(_chunks(report.layout, rank.pp_rank))
        if unit is not None:
            row += [f"{_number(rank.forward_ms)}", f"{_number(rank.backward_ms)}"]
        row.append(f"{rank.share:.1%}")
        if has_memory:
            row += [f"{rank.memory_bytes / 1e9:,.1f}", f"{rank.activation_bytes / 1e9:,.1f}"]
        table.add_row(*row)
    return table


def _number(value: float) -> str:
    """Four digits of a time, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _chunks(layout: LayerLayout, pp_rank: int) -> str:
    """Layers of a rank's chunks, for example 3+2."""
    sizes = (len(layout.layers_of(pp_rank, vp)) for vp in range(layout.virtual_stages))
    return "+".join(map(str, sizes))
