#!/usr/bin/env python3
"""promtool over deploy/prometheus: the configuration is valid, the rules pass their tests, and each alert
has a test in which it rings and one in which it does not.

usage: rules_test.py --venv=DIR --package=DIR
Ends with 77, a skip, where Debian's package of Prometheus cannot be had.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "support", "python"))
import venv


def run(*command, cwd):
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def check_alerts_are_tested(stack):
    alerts = {rule["alert"]: rule for _, rule in stack.rules() if "alert" in rule}
    rings, silent = set(), set()
    for name in ("alerts_worker_test.yml", "alerts_load_test.yml"):
        for test in stack.load_yaml("deploy", "prometheus", "tests", name)["tests"]:
            for case in test["alert_rule_test"]:
                (rings if case["exp_alerts"] else silent).add(case["alertname"])
    assert rings == set(alerts), f"no test in which it rings, or no such alert: {rings ^ set(alerts)}"
    assert silent == set(alerts), f"no test in which it is silent, or no such alert: {silent ^ set(alerts)}"
    recorded = {rule["record"] for _, rule in stack.rules() if "record" in rule}
    with open(os.path.join(stack.PROMETHEUS_FOLDER, "tests", "recording_test.yml"), encoding="utf-8") as file:
        text = file.read()
    # These two are tested by the alerts that stand on them.
    by_alerts = {"instance:writescope_time_to_first_token_seconds:p99_5m",
                 "instance:writescope_inter_token_latency_seconds:p99_5m"}
    untested = {name for name in recorded if name not in text} - by_alerts
    assert not untested, f"recording rules without a test: {untested}"
    return alerts


def check_runbook(stack, alerts):
    """Each alert links to a heading of deploy/README.md, and each such heading has its alert."""
    with open(os.path.join(stack.ROOT, "deploy", "README.md"), encoding="utf-8") as file:
        headings = set(re.findall(r"^#+ (WriteScope\w+)$", file.read(), re.M))
    assert headings == set(alerts), f"runbook and alerts differ: {headings ^ set(alerts)}"
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook"] == f"deploy/README.md#{name.lower()}", rule
        assert rule["labels"]["severity"] in ("page", "ticket"), rule


def check_that_tests_fail(stack, promtool):
    """With a wrong threshold in the rules, promtool says so."""
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "prometheus")
        shutil.copytree(stack.PROMETHEUS_FOLDER, copy)
        for name, right, wrong in (("alerts.yml", "ratio_rate5m > 0.02", "ratio_rate5m > 0.2"),
                                   ("recording.yml", 'device="cpu"}[1m]))\n', 'device="gpu"}[1m]))\n')):
            path = os.path.join(copy, "rules", name)
            with open(path, encoding="utf-8") as file:
                text = file.read()
            assert right in text, f"{name} has no '{right}' to be made wrong"
            with open(path, "w", encoding="utf-8") as file:
                file.write(text.replace(right, wrong))
            tests = os.path.join(copy, "tests")
            done = run(promtool, "test", "rules", *sorted(os.listdir(tests)), cwd=tests)
            assert done.returncode != 0, f"the tests of {name} pass with '{wrong}'"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", required=True)
    parser.add_argument("--package", required=True)
    options = parser.parse_args()
    venv.enter(options.venv)
    import stack
    from prometheus_server import find_prometheus
    promtool = os.path.join(os.path.dirname(find_prometheus(options.package)), "promtool")
    done = run(promtool, "check", "config", "prometheus.yml", cwd=stack.PROMETHEUS_FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr
    tests = os.path.join(stack.PROMETHEUS_FOLDER, "tests")
    done = run(promtool, "test", "rules", *sorted(os.listdir(tests)), cwd=tests)
    assert done.returncode == 0, done.stdout + done.stderr
    alerts = check_alerts_are_tested(stack)
    check_runbook(stack, alerts)
    check_that_tests_fail(stack, promtool)
    print(f"passed: {len(alerts)} alerts")


if __name__ == "__main__":
    main()
