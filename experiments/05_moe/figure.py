"""Loss, load and drops of the routers over training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Okabe and Ito's colours, which colour-blind readers tell apart; dashes tell the rest.
COLOURS = ("#000000", "#d55e00", "#e69f00", "#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#777777", "#8c564b")
BESIDE = "topk"  # losses differ by a few hundredths, which curves of the losses themselves do not show


def draw(routers: Mapping[str, Mapping[str, Any]], png: Path) -> None:
    """Three panels beside each other, one line a router."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    quantities = (
        ("loss", f"Training loss less that of {BESIDE}, nats per byte"),
        ("max_load", "Busiest expert / mean load"),
        ("dropped", "Dropped choices, %"),
    )
    for axes, (key, title) in zip(panels, quantities, strict=True):
        for i, (name, run) in enumerate(routers.items()):
            values = np.asarray(run[key], float) * (100 if key == "dropped" else 1)
            values = values - np.asarray(routers[BESIDE][key]) if key == "loss" else values
            style = {"color": COLOURS[i % len(COLOURS)], "linestyle": "-" if i % 2 else "--", "linewidth": 1.4}
            axes.plot(run["steps"], values, label=name, **style)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel("step")
        axes.grid(axis="y", color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(-0.2, 0.2)
    panels[1].axhline(1, color="#999999", linewidth=0.8)
    panels[1].set_ylim(bottom=0.9)
    panels[2].set_ylim(bottom=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(png, dpi=170)
