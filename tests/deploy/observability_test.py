#!/usr/bin/env python3
"""Worker, controller and a real Prometheus with the shipped configuration: every expression of every
panel, recording rule and alert is evaluated while requests run.

usage: observability_test.py --venv=DIR --bin=DIR --model=DIR --work=DIR --package=DIR
Ends with 77, a skip, where Debian's package of Prometheus cannot be had.
"""
import argparse
import math
import os
import subprocess
import sys
import time
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "support", "python"))
import venv

# Expressions, and series that expressions read, which return nothing here, each with the reason.
# Alerts that do not ring return nothing too; of these the series are looked at.
EMPTY = {
    "DCGM_FI_DEV_XID_ERRORS": "of a GPU",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "of a GPU",
}
WINDOW = "10s"  # For $__rate_interval.


def numbers(answer):
    return [value for value in answer.values() if not math.isnan(value)]


def check_idle(stack, prometheus):
    """Before the first request every series that something reads is there. Rules have no answer for
    fractions of nothing yet."""
    prometheus.await_query("up", lambda a: len(a) == 2 and all(a.values()))
    read = set()
    for _, _, target in stack.panel_targets():
        read.update(stack.selectors(stack.fill_in(target["expr"], WINDOW)))
    for _, rule in stack.rules():
        read.update(stack.selectors(rule["expr"]))
    own = {s for s in read if not s.startswith("instance") and s not in EMPTY}
    assert len(own) > 50, own
    missing = [s for s in own if not prometheus.query(s)]
    assert not missing, f"not there before the first request: {missing}"
    for series in EMPTY:
        assert series in read, f"{series} is excused, and nothing reads it"
        assert not prometheus.query(series), f"{series} is excused, and is there"
    print(f"{len(own)} series are there before the first request")


def check_names(server, *programs):
    """promtool's rules for names, units and help texts."""
    for program in programs:
        with urllib.request.urlopen(f"http://{program.metrics}/metrics", timeout=10) as reply:
            page = reply.read()
        done = subprocess.run([os.path.join(os.path.dirname(server), "promtool"), "check", "metrics"], input=page,
                              capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, f"{program.name}: {done.stdout.decode()}{done.stderr.decode()}"


def check_panels(stack, prometheus, traffic, limit_s=60):
    """Each expression returns a number at some time while requests run."""
    waiting = {where: stack.fill_in(t["expr"], WINDOW) for where, _, t in stack.panel_targets()}
    waiting.update({rule["record"] + str(rule.get("labels", "")): rule["record"]
                    for _, rule in stack.rules() if "record" in rule})
    count = len(waiting)
    end = time.monotonic() + limit_s
    while waiting and time.monotonic() < end:
        assert traffic.problem is None, traffic.problem
        for where, expression in list(waiting.items()):
            if numbers(prometheus.query(expression)):
                del waiting[where]
        time.sleep(0.3)
    assert not waiting, "no data:\n" + "\n".join(f"{w}: {e}" for w, e in waiting.items())
    print(f"{count} expressions of panels and recording rules returned data; {traffic.sent} requests")


def check_rules(stack, prometheus):
    """Prometheus took all rules, none fails, and no alert rings."""
    shipped = [rule.get("record") or rule["alert"] for _, rule in stack.rules()]
    groups = prometheus.get("rules")["groups"]
    loaded = [rule for group in groups for rule in group["rules"]]
    assert sorted(r["name"] for r in loaded) == sorted(shipped), (loaded, shipped)
    for rule in loaded:
        assert rule["health"] == "ok" and not rule.get("lastError"), rule
        if rule["type"] == "alerting":
            # A small machine may be off its prediction, and clients give up: for minutes neither lasts.
            assert rule["state"] != "firing", f"{rule['name']} rings while all is well: {rule['alerts']}"
    print(f"{len(loaded)} rules evaluated without an error; no alert rings")


def check_values(prometheus, worker):
    """Some numbers, so that expressions cannot be right in form only."""
    fraction = numbers(prometheus.query("instance:writescope_attention_bytes:cpu_fraction1m"))
    assert len(fraction) == 1 and 0.05 < fraction[0] < 1, fraction
    busy = prometheus.query("sum by (part) (instance:writescope_busy:ratio_rate1m)")
    assert set(busy) == {"part=cpu", "part=gpu", "part=link"} and all(0 < v <= 1.2 for v in busy.values()), busy
    hits = numbers(prometheus.query("instance:writescope_prefix_hit:ratio_rate5m"))
    assert len(hits) == 1 and 0 < hits[0] < 1, hits
    errors = prometheus.query("instance:writescope_errors:ratio_rate5m")
    # The clients that gave up count as DEADLINE_EXCEEDED or CANCELLED; the rest went well.
    assert len(errors) == 1 and all(0 <= v < 0.5 for v in errors.values()), errors
    instances = {tuple(p for p in labels.split(",") if p.startswith("instance=")) for labels in prometheus.query("up")}
    assert instances == {("instance=127.0.0.1",)}, f"one instance is one pair: {instances}"
    print("CPU's fraction:", fraction, "busy:", busy, "prefix hits:", hits)
    worker.process.kill()
    prometheus.await_query('ALERTS{alertname="WriteScopeWorkerDown"}', lambda a: len(a) == 1)
    assert not prometheus.query('ALERTS{alertname="WriteScopeControllerDown"}')


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--venv", "--bin", "--model", "--work", "--package"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    venv.enter(options.venv)
    import stack
    from prometheus_server import find_prometheus
    server = find_prometheus(options.package)
    with stack.running(options, server) as (worker, controller, prometheus):
        check_idle(stack, prometheus)
        check_names(server, worker, controller)
        with stack.Traffic(os.path.join(options.bin, "writescope"), worker.generation, options.model,
                           options.work) as traffic:
            check_panels(stack, prometheus, traffic)
            check_rules(stack, prometheus)
        assert traffic.problem is None, traffic.problem
        check_values(prometheus, worker)
    print("passed")


if __name__ == "__main__":
    main()
