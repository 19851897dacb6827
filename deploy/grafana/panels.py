"""Builds Grafana's JSON for the panels that the dashboards use. Standard library only.

A panel is a dict as Grafana 11 stores it; grid positions are filled in by lay_out(). Descriptions and
units are required: a panel without them cannot be made.
"""

DATASOURCE = {"type": "prometheus", "uid": "writescope-prometheus"}
GRID_COLUMNS = 24
# One colour for each part of the machine, on every panel.
COLORS = {"CPU": "orange", "GPU": "green", "link": "blue", "device": "green", "stream": "blue",
          "swing": "yellow", "host": "purple"}


def target(expr, legend, instant=False):
    return {"datasource": DATASOURCE, "expr": expr, "legendFormat": legend,
            "range": not instant, "instant": instant, "editorMode": "code"}


def _panel(kind, title, description, unit, targets, width, height, options, custom, defaults):
    colors = [{"matcher": {"id": "byName", "options": t["legendFormat"]},
               "properties": [{"id": "color", "value": {"mode": "fixed",
                                                        "fixedColor": COLORS[t["legendFormat"]]}}]}
              for t in targets if t["legendFormat"] in COLORS]
    for index, one in enumerate(targets):
        one["refId"] = chr(ord("A") + index)
    return {"type": kind, "title": title, "description": description, "datasource": DATASOURCE,
            "targets": targets, "options": options,
            "fieldConfig": {"defaults": {"unit": unit, "custom": custom, **defaults},
                            "overrides": colors},
            "gridPos": {"h": height, "w": width, "x": 0, "y": 0}}


def time_series(title, description, unit, targets, stacked=False, least=0, most=None, width=12):
    """Lines over time; `stacked` fills them and adds them up."""
    custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 40 if stacked else 0,
              "showPoints": "never", "spanNulls": False,
              "stacking": {"mode": "normal" if stacked else "none", "group": "A"}}
    defaults = {} if least is None else {"min": least}
    if most is not None:
        defaults["max"] = most
    options = {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
               "tooltip": {"mode": "multi", "sort": "desc"}}
    return _panel("timeseries", title, description, unit, targets, width, 8, options, custom, defaults)


def stat(title, description, unit, targets, red_from=None, red_below=None, decimals=None, width=4):
    """The last value as a number, red from or below a limit."""
    steps = [{"color": "green", "value": None}]
    if red_from is not None:
        steps.append({"color": "red", "value": red_from})
    if red_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": red_below}]
    options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
               "colorMode": "value", "graphMode": "area", "justifyMode": "auto", "textMode": "auto",
               "orientation": "auto", "wideLayout": True}
    defaults = {"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}
    if decimals is not None:
        defaults["decimals"] = decimals
    return _panel("stat", title, description, unit, targets, width, 4, options, {}, defaults)


def states(title, description, targets, words, width=12):
    """Bars over time; `words` maps a value to its text and colour."""
    mappings = [{"type": "value", "options": {
        str(value): {"text": text, "color": color, "index": index}
        for index, (value, (text, color)) in enumerate(words.items())}}]
    options = {"mergeValues": True, "showValue": "auto", "alignValue": "left", "rowHeight": 0.9,
               "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
               "tooltip": {"mode": "single", "sort": "none"}}
    return _panel("state-timeline", title, description, "short", targets, width, 8, options,
                  {"lineWidth": 0, "fillOpacity": 70}, {"mappings": mappings})


def row(title):
    return {"type": "row", "title": title, "collapsed": False, "panels": [],
            "gridPos": {"h": 1, "w": GRID_COLUMNS, "x": 0, "y": 0}}


def lay_out(panels):
    """Gives ids and positions: from left to right, a row's panels have one height."""
    x = y = line_height = 0
    for index, panel in enumerate(panels):
        grid = panel["gridPos"]
        if x + grid["w"] > GRID_COLUMNS:
            x, y, line_height = 0, y + line_height, 0
        grid["x"], grid["y"] = x, y
        x, line_height = x + grid["w"], max(line_height, grid["h"])
        panel["id"] = index + 1
    return panels


def variable(name, label, query):
    return {"type": "query", "name": name, "label": label, "datasource": DATASOURCE,
            "query": {"query": query, "refId": "variable"}, "refresh": 2, "sort": 1, "multi": True,
            "includeAll": True, "allValue": ".*", "hide": 0, "skipUrlSync": False,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]}, "options": []}


def dashboard(uid, title, description, panels):
    return {"uid": uid, "title": title, "description": description, "tags": ["writescope"],
            "schemaVersion": 41, "editable": True, "graphTooltip": 1, "timezone": "browser",
            "refresh": "10s", "time": {"from": "now-30m", "to": "now"},
            "templating": {"list": [
                variable("model", "Model", "label_values(writescope_build_info, model)"),
                variable("instance", "Instance",
                         'label_values(writescope_build_info{model=~"$model"}, instance)')]},
            "annotations": {"list": []},
            "links": [{"type": "dashboards", "title": "WriteScope", "tags": ["writescope"], "asDropdown": False,
                       "icon": "external link", "includeVars": True, "keepTime": True, "targetBlank": False,
                       "tooltip": "", "url": ""}],
            "panels": lay_out(panels)}
