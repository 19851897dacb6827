"""What is shipped for Prometheus and Grafana, as data; and the two programs under a real Prometheus."""
import contextlib
import json
import os
import re
import subprocess
import sys
import threading

import yaml

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests", "e2e"))
import programs
from prometheus_server import Prometheus

PROMETHEUS_FOLDER = os.path.join(ROOT, "deploy", "prometheus")
DASHBOARD_FOLDER = os.path.join(ROOT, "deploy", "grafana", "dashboards")
# Little device memory, so that nearly all KV is spilled, and a link that neither processor is alone
# best with.
WORKER_FLAGS = ("--vram-budget=19MiB", "--ring-size=1MiB", "--host-budget=256MiB", "--prefill-chunk=256",
                "--max-sequences=2", "--device-threads=1", "--workers=1", "--link-gbps=3", "--cut=planned")


def load_yaml(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return yaml.safe_load(file)


def dashboards():
    """{file name: dashboard}."""
    found = {}
    for name in sorted(os.listdir(DASHBOARD_FOLDER)):
        with open(os.path.join(DASHBOARD_FOLDER, name), encoding="utf-8") as file:
            found[name] = json.load(file)
    return found


def panel_targets():
    """(where, panel, target) of every expression of every dashboard."""
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                yield f"{name}, '{panel['title']}', {target['legendFormat']}", panel, target


def rules():
    """(file, rule) of every recording and alert rule."""
    for name in ("recording.yml", "alerts.yml"):
        for group in load_yaml("deploy", "prometheus", "rules", name)["groups"]:
            for rule in group["rules"]:
                yield name, rule


def fill_in(expression, window):
    """An expression of a panel with Grafana's variables replaced, everything selected."""
    filled = expression.replace("$__rate_interval", window).replace('"$model"', '".*"')
    filled = filled.replace('"$instance"', '".*"')
    assert "$" not in filled, filled
    return filled


def selectors(expression):
    """Every `name{matchers}` in an expression: what it reads."""
    # Functions are followed by a bracket, the labels of by() and on() stand in one.
    bare = re.sub(r"\b(?:by|on|ignoring|group_left|without)\s*\([^)]*\)", " ", expression)
    return re.findall(r"(?:\b(?:instance|instance_region|writescope|DCGM|up)(?:[:_]\w[\w:]*)?\b)(?:\{[^}]*\})?", bare)


def shipped_config(work, worker, controller, scrape="500ms", evaluation="1s"):
    """deploy/prometheus/prometheus.yml, written to `work` with what a test has to change: the names to
    look up become addresses, the times short. Jobs, relabelling and rules stay."""
    config = load_yaml("deploy", "prometheus", "prometheus.yml")
    config["global"] = {"scrape_interval": scrape, "scrape_timeout": scrape, "evaluation_interval": evaluation}
    config["rule_files"] = [os.path.join(PROMETHEUS_FOLDER, path) for path in config["rule_files"]]
    addresses = {"writescope-worker": worker, "writescope-controller": controller}
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [addresses.pop(job["job_name"])]}]
    assert not addresses, f"no job scrapes {addresses}"
    os.makedirs(work, exist_ok=True)
    path = os.path.join(work, "prometheus.yml")
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    return path


class Traffic:
    """Requests one after the other until the end of the block: prompts of which a part repeats, and every
    fifth is given up by its client. `tokens` is the length of the answers, `characters` that of prompts."""

    def __init__(self, client, address, model, work, tokens=96, characters=9000):
        self.tokens = tokens
        os.makedirs(work, exist_ok=True)
        with open(os.path.join(model, "prose.txt"), encoding="utf-8") as file:
            prose = file.read()
        self.prompts = []
        for index in range(3):
            path = os.path.join(work, f"prompt{index}.txt")
            with open(path, "w", encoding="utf-8") as file:
                file.write((prose * 8)[:characters + characters // 3 * index])
            self.prompts.append(path)
        self.command = [client, f"--address={address}", "generate", "--ignore-eos", "--temperature=0"]
        self.sent = 0
        self.stop = threading.Event()
        self.problem = None
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        while not self.stop.is_set():
            self.sent += 1
            give_up = self.sent % 5 == 0
            done = subprocess.run([*self.command, f"--file={self.prompts[self.sent % 3]}",
                                   f"--max-tokens={20000 if give_up else self.tokens}",
                                   f"--timeout={'1s' if give_up else '60s'}"],
                                  capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != (5 if give_up else 0):
                self.problem = f"request {self.sent} ended with {done.returncode}: {done.stderr}"
                return

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()


@contextlib.contextmanager
def running(options, server, scrape="500ms", evaluation="1s", flags=WORKER_FLAGS):
    """(worker, controller, prometheus), serving the demo checkpoint."""
    with programs.start_worker(options.bin, options.model, *flags) as worker, \
            programs.start_controller(options.bin, worker) as controller:
        config = shipped_config(options.work, worker.metrics, controller.metrics, scrape, evaluation)
        with Prometheus(server, options.work, config) as prometheus:
            yield worker, controller, prometheus
