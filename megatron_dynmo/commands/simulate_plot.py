"""A plot of simulated iteration times, as PNG or as one HTML file with the plot in it."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

from megatron_dynmo.errors import ConfigError
from megatron_dynmo.simulate.report import MEANINGS
from megatron_dynmo.simulate.run import Comparison

__all__ = ["check_plot_path", "write_plot"]

_SUFFIXES = (".png", ".html")
_YARDSTICKS = ("balanced", "ideal")
_STYLE = (
    "body{font-family:system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.3rem .8rem;border-bottom:1px solid #ccc;"
    "text-align:right}td:first-child,td:last-child,th:first-child,th:last-child{text-align:left}"
    "svg{width:100%;height:auto}"
)


def check_plot_path(path: Path) -> None:
    """Refuse a path that cannot be written, before the work is done.

    Raises:
        ConfigError: another suffix than .png or .html, or no such folder.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {' or '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}; make it first")


def write_plot(path: Path, comparison: Comparison, title: str) -> None:
    """Draw iteration time over the run, one line for each policy and a dot for each move.

    Args:
        path: as `check_plot_path` accepts it.
        comparison: what to draw.
        title: one line above the plot.

    Raises:
        ConfigError: the file cannot be written.
    """
    is_html = path.suffix.lower() == ".html"
    image = _draw(comparison, title, "svg" if is_html else "png")
    content = _page(comparison, title, image.decode()).encode() if is_html else image
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another file") from error


def _draw(comparison: Comparison, title: str, file_format: str) -> bytes:
    # Without pyplot nothing is kept between calls and no window system is looked for.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    trace = comparison.case.trace
    iterations = range(trace.first_iteration, trace.first_iteration + trace.num_iterations)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for outcome in comparison.outcomes:
        style: dict[str, Any] = {}
        if outcome.policy in _YARDSTICKS:
            style = {"color": "black", "linestyle": ":" if outcome.policy == "ideal" else "--"}
        lines = axes.plot(
            iterations,
            outcome.iteration_ms,
            label=f"{outcome.policy}  ({comparison.speedup_vs_static(outcome):.2f}x)",
            linewidth=1.2,
            **style,
        )
        at = [move.iteration for move in outcome.moves]
        times = [outcome.iteration_ms[i - trace.first_iteration] for i in at]
        axes.plot(at, times, "o", markersize=4, color=lines[0].get_color())
    axes.set_xlabel("iteration (a dot is a move)")
    axes.set_ylabel("iteration time, ms (simulated)")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    buffer = io.BytesIO()
    # A fixed salt and no date: the same simulation gives the same file.
    with rc_context({"svg.hashsalt": "dynmo"}):
        metadata = {"Date": None} if file_format == "svg" else {"Software": None}
        figure.savefig(buffer, format=file_format, dpi=150, metadata=metadata)
    return buffer.getvalue()


def _page(comparison: Comparison, title: str, svg: str) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(outcome.policy)}</td>"
        f"<td>{outcome.iteration_ms.mean():,.1f}</td>"
        f"<td>{comparison.speedup_vs_static(outcome):.3f}</td>"
        f"<td>{comparison.fraction_of_ideal(outcome):.1%}</td>"
        f"<td>{len(outcome.moves)}</td><td>{outcome.moving_ms / 1e3:,.1f}</td>"
        f"<td>{comparison.gpu_hours(outcome):,.2f}</td>"
        f"<td>{html.escape(MEANINGS.get(outcome.policy, ''))}</td></tr>"
        for outcome in comparison.outcomes
    )
    drawing = svg[svg.index("<svg") :]  # without the XML prologue, which HTML does not take
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>"
        "<p>Simulated: as good as the costs put in, exact for the schedule's order of passes.</p>"
        f"{drawing}<table><tr><th>policy</th><th>mean iteration, ms</th>"
        "<th>speed-up over static</th><th>of ideal</th><th>moves</th><th>moving, s</th>"
        f"<th>GPU-hours</th><th>what it is</th></tr>{rows}</table></html>\n"
    )
