#!/usr/bin/env python3
"""Draws the dashboards from what a real Prometheus recorded: worker and controller run under load for
some minutes, and in the middle the simulated link becomes three times slower. Not Grafana's rendering,
but its JSON: positions, titles, units, legends and colours are the dashboards' own.

usage: draw_dashboards.py --bin=DIR --model=DIR --work=DIR --package=DIR --out=DIR [--seconds=N]
Needs PyYAML and matplotlib. Run by hand; deploy/README.md shows the pictures.
"""
import argparse
import math
import os
import re
import subprocess
import time

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

import stack
from prometheus_server import find_prometheus

# As deploy/quickstart.sh: at 12 GB/s neither processor alone is the best choice.
WORKER_FLAGS = ("--vram-budget=22MiB", "--ring-size=4MiB", "--host-budget=256MiB", "--prefill-chunk=256",
                "--max-sequences=2", "--device-threads=1", "--workers=1", "--link-gbps=12", "--cut=planned")
COLUMN_PIXELS, UNIT_PIXELS, DPI = 62, 30, 100
BACKGROUND, PANEL, TEXT, FAINT = "#111217", "#181b1f", "#ccccdc", "#2c3235"
NAMED = {"orange": "#ff9830", "green": "#73bf69", "blue": "#5794f2", "yellow": "#fade2a", "purple": "#b877d9",
         "red": "#f2495c", "transparent": "#00000000"}
PALETTE = ["#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#b0b0b8"]


def scaled(value, base, units, suffix=""):
    size = abs(value)
    for unit in units[:-1]:
        if size < base:
            break
        size, value = size / base, value / base
        units = units[1:]
    return f"{value:.3g} {units[0]}{suffix}".strip()


def with_unit(value, unit):
    if math.isnan(value):
        return "no data"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "bytes":
        return scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"])
    if unit == "Bps":
        return scaled(value, 1000, ["B", "kB", "MB", "GB", "TB"], "/s")
    if unit == "s":
        if value == 0 or abs(value) >= 1:
            return f"{value:.3g} s"
        return f"{1e3 * value:.3g} ms" if abs(value) >= 1e-3 else f"{1e6 * value:.3g} us"
    text = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text + (" /min" if unit == "cpm" else "")


def record(options, server):
    """{expression: [(legend labels, times, values)]} of every panel, times in seconds from the start."""
    client = os.path.join(options.bin, "writescope")
    with stack.running(options, server, scrape="1s", evaluation="2s", flags=WORKER_FLAGS) as (worker, _, prometheus):
        start = time.time()
        with stack.Traffic(client, worker.generation, options.model, options.work + "/a", tokens=700,
                           characters=45000), \
                stack.Traffic(client, worker.generation, options.model, options.work + "/b", tokens=500,
                              characters=35000):
            time.sleep(options.seconds / 2)
            subprocess.run([client, f"--control-address={worker.control}", "share", "link-pace", "4"], check=True)
            time.sleep(options.seconds / 2)
        end = time.time()
        recorded = {}
        for _, _, target in stack.panel_targets():
            expression = stack.fill_in(target["expr"], "15s")
            result = prometheus.get("query_range", query=expression, start=start + 5, end=end, step="2")["result"]
            recorded[target["expr"]] = [
                (r["metric"], [t - start for t, _ in r["values"]], [float(v) for _, v in r["values"]])
                for r in result]
        return recorded


def series_of(panel, recorded):
    """(legend, times, values) of each line."""
    lines = []
    for target in panel["targets"]:
        for labels, times, values in recorded[target["expr"]]:
            legend = re.sub(r"\{\{(\w+)\}\}", lambda m: labels.get(m.group(1), ""), target["legendFormat"])
            lines.append((legend, times, values))
    return lines


def color_of(panel, legend, index):
    for override in panel["fieldConfig"]["overrides"]:
        if override["matcher"]["options"] == legend:
            return NAMED[override["properties"][0]["value"]["fixedColor"]]
    return PALETTE[index % len(PALETTE)]


def draw_stat(axes, panel, lines):
    axes.axis("off")
    values = [v for v in (lines[0][2] if lines else []) if not math.isnan(v)]
    value = values[-1] if values else math.nan
    defaults = panel["fieldConfig"]["defaults"]
    color = "green"
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            color = step["color"]
    axes.text(0.5, 0.45, with_unit(value, defaults["unit"]), color=NAMED[color], fontsize=17, ha="center",
              va="center", transform=axes.transAxes)


def draw_states(axes, panel, lines):
    mapping = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
    for index, (_, times, values) in enumerate(lines):
        for at, value in zip(times, values):
            axes.broken_barh([(at, 2)], (index - 0.4, 0.8), color=NAMED[mapping[str(int(value))]["color"]])
    axes.set_yticks(range(len(lines)), [legend for legend, _, _ in lines])


def draw_lines(axes, panel, lines):
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    # A zero line adds nothing to a stack but a legend.
    shown = [line for line in lines if not stacked or any(v > 0 for v in line[2])] or lines[:1]
    if stacked and shown:
        times = sorted({t for _, line_times, _ in shown for t in line_times})
        heights = [[dict(zip(line_times, values)).get(t, 0) for t in times] for _, line_times, values in shown]
        heights = [[0 if math.isnan(v) else v for v in values] for values in heights]
        colors = [color_of(panel, legend, i) for i, (legend, _, _) in enumerate(shown)]
        axes.stackplot(times, heights, colors=colors, alpha=0.45, labels=[legend for legend, _, _ in shown])
    else:
        for index, (legend, times, values) in enumerate(shown):
            axes.plot(times, values, color=color_of(panel, legend, index), linewidth=1, label=legend)
    if "min" in defaults:
        axes.set_ylim(bottom=defaults["min"])
    if "max" in defaults:
        axes.set_ylim(top=defaults["max"] * 1.03)
    elif axes.get_ylim()[1] <= 0.1 and not any(v > 0 for _, _, values in shown for v in values):
        axes.set_ylim(top=1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: with_unit(v, defaults["unit"])))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.legend(loc="upper left", bbox_to_anchor=(-0.08, -0.13), ncol=5, fontsize=6.5, frameon=False, labelcolor=TEXT,
                handlelength=1.2, columnspacing=1.2)


def draw(dashboard, recorded, seconds, path):
    height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in dashboard["panels"])
    wide, tall = 24 * COLUMN_PIXELS, height * UNIT_PIXELS + 40
    figure = plt.figure(figsize=(wide / DPI, tall / DPI), dpi=DPI, facecolor=BACKGROUND)
    figure.text(0.008, 1 - 26 / tall, dashboard["title"], color="white", fontsize=14)
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        left, top = grid["x"] * COLUMN_PIXELS, grid["y"] * UNIT_PIXELS + 40
        width, high = grid["w"] * COLUMN_PIXELS, grid["h"] * UNIT_PIXELS
        if panel["type"] == "row":
            figure.text((left + 10) / wide, 1 - (top + 21) / tall, panel["title"], color=TEXT, fontsize=10, weight="bold")
            continue
        figure.add_artist(plt.Rectangle(((left + 3) / wide, 1 - (top + high - 3) / tall), (width - 6) / wide,
                                        (high - 6) / tall, facecolor=PANEL, transform=figure.transFigure, zorder=-1))
        figure.text((left + 12) / wide, 1 - (top + 21) / tall, panel["title"], color=TEXT, fontsize=8.5)
        axes = figure.add_axes([(left + 70) / wide, 1 - (top + high - 52) / tall, (width - 85) / wide,
                                (high - 86) / tall], facecolor=PANEL)
        lines = series_of(panel, recorded)
        {"stat": draw_stat, "state-timeline": draw_states, "timeseries": draw_lines}[panel["type"]](axes, panel, lines)
        if panel["type"] == "stat":
            axes.set_position([left / wide, 1 - (top + high - 8) / tall, width / wide, (high - 32) / tall])
            continue
        axes.set_xlim(0, seconds)
        axes.axvline(seconds / 2, color="#6e7077", linewidth=0.6, linestyle=":")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{int(v) // 60}:{int(v) % 60:02d}"))
        axes.tick_params(colors=TEXT, labelsize=7, length=0)
        axes.grid(color=FAINT, linewidth=0.5)
        for spine in axes.spines.values():
            spine.set_visible(False)
    figure.savefig(path, facecolor=BACKGROUND)
    plt.close(figure)
    # A palette is enough, and a third of the size.
    with Image.open(path) as picture:
        palette = picture.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    palette.save(path, optimize=True)
    print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--bin", "--model", "--work", "--package", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--seconds", type=int, default=240)
    options = parser.parse_args()
    recorded = record(options, find_prometheus(options.package))
    for name, dashboard in stack.dashboards().items():
        draw(dashboard, recorded, options.seconds, os.path.join(options.out, name.replace(".json", ".png")))


if __name__ == "__main__":
    main()
