#!/usr/bin/env python3
"""The dashboards against Grafana's own types, offline, and against what they should have.

usage: dashboards_test.py --venv=DIR
"""
import argparse
import copy
import enum
import importlib
import json
import os
import re
import subprocess
import sys
import typing

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "support", "python"))
import venv

# Module of Grafana's SDK that has the types of a kind of panel.
PANEL_MODULES = {"timeseries": "timeseries", "stat": "stat", "state-timeline": "statetimeline", "row": None}

# Counters that are news at any height.
SHOWN_AS_THEY_ARE = {
    "writescope_kv_moved_bytes_total", "writescope_failed_steps_total", "writescope_numeric_anomalies_total",
    "writescope_kv_integrity_failures_total", "writescope_metrics_dropped_observations_total"}


class Types:
    """Checks JSON against the classes that Grafana generates from its schemas."""

    def __init__(self):
        sdk = "grafana_foundation_sdk."
        self.models = importlib.import_module(sdk + "models.dashboard")
        self.prometheus = importlib.import_module(sdk + "models.prometheus")
        self.units = {value for name, value in vars(importlib.import_module(sdk + "models.units")).items()
                      if isinstance(value, str) and not name.startswith("__")}
        self.panels = {kind: importlib.import_module(sdk + "models." + module)
                       for kind, module in PANEL_MODULES.items() if module}
        encoder = importlib.import_module(sdk + "cog.encoder")
        plugins = importlib.import_module(sdk + "cog.plugins")
        plugins.register_default_plugins()
        self.encode = lambda model: json.loads(encoder.JSONEncoder(sort_keys=True).encode(model))

    def problems(self, cls, data, where):
        """What of `data` the class does not know, and values whose type is another than its fields say."""
        model = cls.from_json(copy.deepcopy(data))
        yield from self._values(model, where)
        yield from self._lost(data, self.encode(model), where)

    def _lost(self, data, kept, where):
        if isinstance(data, dict) and isinstance(kept, dict):
            for key, value in data.items():
                if key not in kept:
                    if value not in (None, [], {}):
                        yield f"{where}.{key}: Grafana knows no such field"
                else:
                    yield from self._lost(value, kept[key], f"{where}.{key}")
        elif isinstance(data, list) and isinstance(kept, list):
            for index, (one, other) in enumerate(zip(data, kept)):
                yield from self._lost(one, other, f"{where}[{index}]")
            if len(data) != len(kept):
                yield f"{where}: {len(data)} elements, of which Grafana reads {len(kept)}"
        elif data != kept:
            yield f"{where}: {data!r} is read as {kept!r}"

    def _values(self, model, where):
        try:
            hints = typing.get_type_hints(type(model))
        except (NameError, TypeError):
            return
        for name, hint in hints.items():
            value = getattr(model, name, None)
            if not self._fits(value, hint):
                yield f"{where}.{name}: {value!r} is no {hint}"
            for index, one in enumerate(value if isinstance(value, list) else [value]):
                if hasattr(type(one), "from_json"):
                    yield from self._values(one, f"{where}.{name}[{index}]")

    def _fits(self, value, hint):
        origin = typing.get_origin(hint)
        if hint is typing.Any or value is None:
            return True
        if origin is typing.Union or (origin is not None and origin.__class__ is type and origin.__name__ == "UnionType"):
            return any(self._fits(value, one) for one in typing.get_args(hint) if one is not type(None))
        if origin is typing.Literal:
            return value in typing.get_args(hint)
        if origin in (list, dict):
            arguments = typing.get_args(hint)
            if not isinstance(value, origin):
                return False
            return origin is dict or all(self._fits(one, arguments[0]) for one in value)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return value in [member.value for member in hint] or isinstance(value, hint)
        if hint is float:
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(hint, type):
            return isinstance(value, hint)
        return True

    def check(self, dashboard):
        """All problems of a dashboard with Grafana's types."""
        whole = copy.deepcopy(dashboard)
        whole["panels"] = []
        yield from self.problems(self.models.Dashboard, whole, "dashboard")
        for panel in dashboard["panels"]:
            where = f"panel '{panel['title']}'"
            kind = panel["type"]
            if kind not in PANEL_MODULES:
                yield f"{where}: '{kind}' is no kind of panel that this test knows"
                continue
            if kind == "row":
                yield from self.problems(self.models.RowPanel, panel, where)
                continue
            module = self.panels[kind]
            frame = copy.deepcopy(panel)
            options, custom = frame.pop("options"), frame["fieldConfig"]["defaults"].pop("custom")
            targets = frame.pop("targets")
            yield from self.problems(self.models.Panel, frame, where)
            yield from self.problems(module.Options, options, where + ".options")
            if hasattr(module, "FieldConfig"):
                yield from self.problems(module.FieldConfig, custom, where + ".custom")
            elif custom:
                yield f"{where}.custom: this kind of panel has none"
            for target in targets:
                yield from self.problems(self.prometheus.Dataquery, target, where + ".target")
            unit = panel["fieldConfig"]["defaults"].get("unit")
            if unit not in self.units:
                yield f"{where}: '{unit}' is no unit of Grafana"


def requirements(dashboard, source_uid):
    """What every dashboard here has, beyond being valid."""
    ids = [panel["id"] for panel in dashboard["panels"]]
    if len(ids) != len(set(ids)):
        yield "two panels have one id"
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        where = f"panel '{panel['title']}'"
        if len(panel["description"]) < 20:
            yield f"{where}: no description"
        if not panel["fieldConfig"]["defaults"].get("unit"):
            yield f"{where}: no unit"
        uids = {panel["datasource"]["uid"]} | {t["datasource"]["uid"] for t in panel["targets"]}
        if uids != {source_uid}:
            yield f"{where}: datasources {uids}"
        for target in panel["targets"]:
            if not target["legendFormat"]:
                yield f"{where}: no legend"
            counters = set(re.findall(r"writescope_\w+_total\b", target["expr"])) - SHOWN_AS_THEY_ARE
            if counters and "rate(" not in target["expr"]:
                yield f"{where}: a counter without a rate: {target['expr']}"
        grid = panel["gridPos"]
        if grid["x"] + grid["w"] > 24:
            yield f"{where}: outside the grid"
    for one in dashboard["templating"]["list"]:
        if one["datasource"]["uid"] != source_uid:
            yield f"variable {one['name']}: another datasource"


def check_that_problems_are_found(types, dashboard):
    """Each of these breaks a dashboard in one way."""
    def broken(change):
        changed = copy.deepcopy(dashboard)
        change(changed, next(p for p in changed["panels"] if p["type"] == "timeseries"))
        return changed
    for name, change in {
            "unknown field": lambda d, p: p.update(legend={"show": True}),
            "unknown option": lambda d, p: p["options"].update(legends=1),
            "unknown custom field": lambda d, p: p["fieldConfig"]["defaults"]["custom"].update(width=1),
            "wrong word": lambda d, p: p["fieldConfig"]["defaults"]["custom"].update(drawStyle="dots"),
            "text for a number": lambda d, p: p["gridPos"].update(h="tall"),
            "unit": lambda d, p: p["fieldConfig"]["defaults"].update(unit="bytes/s"),
            "target": lambda d, p: p["targets"][0].update(query="up"),
            "kind": lambda d, p: p.update(type="graph")}.items():
        assert list(types.check(broken(change))), f"not found: {name}"
    for name, change in {
            "datasource": lambda d, p: p["targets"][0]["datasource"].update(uid="${DS_PROMETHEUS}"),
            "legend": lambda d, p: p["targets"][0].update(legendFormat=""),
            "description": lambda d, p: p.update(description=""),
            "counter": lambda d, p: p["targets"][0].update(expr="writescope_steps_total")}.items():
        assert list(requirements(broken(change), "writescope-prometheus")), f"not found: {name}"


def check_readme(stack):
    """deploy/README.md shows a picture of each dashboard and explains each panel."""
    with open(os.path.join(stack.ROOT, "deploy", "README.md"), encoding="utf-8") as file:
        text = file.read()
    for name, dashboard in stack.dashboards().items():
        picture = "grafana/pictures/" + name.replace(".json", ".png")
        assert os.path.exists(os.path.join(stack.ROOT, "deploy", picture)), f"no {picture}"
        assert f"({picture})" in text, f"README.md does not show {picture}"
        unsaid = [p["title"] for p in dashboard["panels"] if p["type"] != "row" and p["title"] not in text]
        assert not unsaid, f"README.md does not explain the panels {unsaid} of {name}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", required=True)
    options = parser.parse_args()
    venv.enter(options.venv)
    import stack
    maker = os.path.join(stack.ROOT, "deploy", "grafana", "make_dashboards.py")
    subprocess.run([sys.executable, "-B", maker, "--check"], check=True, timeout=60)
    sources = stack.load_yaml("deploy", "grafana", "provisioning", "datasources", "prometheus.yml")["datasources"]
    assert len(sources) == 1 and sources[0]["isDefault"], sources
    interval = stack.load_yaml("deploy", "prometheus", "prometheus.yml")["global"]["scrape_interval"]
    assert sources[0]["jsonData"]["timeInterval"] == interval, "the datasource names another scrape interval"
    types = Types()
    problems, uids = [], set()
    for name, dashboard in stack.dashboards().items():
        problems += [f"{name}: {p}" for p in types.check(dashboard)]
        problems += [f"{name}: {p}" for p in requirements(dashboard, sources[0]["uid"])]
        uids.add(dashboard["uid"])
        check_that_problems_are_found(types, dashboard)
    assert not problems, "\n".join(problems)
    assert len(uids) == 2, uids
    check_readme(stack)
    print("passed")


if __name__ == "__main__":
    main()
