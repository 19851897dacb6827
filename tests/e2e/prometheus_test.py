#!/usr/bin/env python3
"""A real Prometheus server scrapes worker and controller; the split is read back with PromQL.

usage: prometheus_test.py --worker=PROGRAM --controller=PROGRAM --client=PROGRAM --model=DIR --work=DIR
Ends with 77, a skip, where Debian's package of Prometheus cannot be had.
"""
import argparse
import os
import re
import subprocess
import sys
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import programs
from prometheus_server import Prometheus, find_prometheus

CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 400ms}}
scrape_configs:
- job_name: worker
  static_configs: [{{targets: ['{worker}']}}]
- job_name: controller
  static_configs: [{{targets: ['{controller}']}}]
"""


def scrape(address, name):
    """The values of a metric, read from the program itself: {labels as printed: value}."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {labels: float(value)
            for labels, value in re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", text, re.M)}


def generate(options, worker, prompt_tokens):
    """Some traffic, most of whose KV is spilled."""
    with open(os.path.join(options.model, "prose.txt"), encoding="utf-8") as file:
        prose = file.read()
    prompt = os.path.join(options.work, "prompt.txt")
    with open(prompt, "w", encoding="utf-8") as file:
        file.write((prose * 2)[:prompt_tokens * 4])
    done = subprocess.run([options.client, f"--address={worker.generation}", "generate", f"--file={prompt}",
                           "--max-tokens=128", "--ignore-eos"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def check(options, prometheus, worker, controller):
    up = prometheus.await_query("up", lambda a: len(a) == 2 and all(a.values()))
    print("scraped:", ", ".join(sorted(up)))
    # All series are there before the first request.
    idle = prometheus.await_query("sum by (device) (writescope_attention_bytes_total)", lambda a: len(a) == 2)
    assert set(idle) == {"device=cpu", "device=gpu"} and not any(idle.values()), idle

    generate(options, worker, prompt_tokens=4096)
    split = prometheus.await_query(
        "sum by (device) (increase(writescope_attention_bytes_total[30s])) / ignoring (device) group_left "
        "sum(increase(writescope_attention_bytes_total[30s]))",
        lambda a: len(a) == 2 and all(v > 0 for v in a.values()))
    print("attention bytes by processor:", split)
    assert abs(sum(split.values()) - 1) < 1e-6, split

    # The worker is idle now: what Prometheus says has to become what the worker says.
    own = list(scrape(worker.metrics, "writescope_cpu_share_ratio").values())
    share = prometheus.await_query("writescope_cpu_share_ratio", lambda a: list(a.values()) == own)
    print("share in force at the worker:", share)
    assert 0 < own[0] <= 1, own
    streamed = prometheus.query('writescope_kv_transfer_bytes_total{direction="h2d"}')
    assert all(v > 0 for v in streamed.values()) and len(streamed) == 1, streamed

    # The controller saw the same worker, and Prometheus sees both sides of the table it pushed.
    taken = prometheus.await_query(
        'sum(writescope_controller_updates_total{outcome=~"applied|clamped"})',
        lambda a: any(v > 0 for v in a.values()))
    same = prometheus.await_query("writescope_cpu_share_generation", lambda a: any(v > 0 for v in a.values()))
    print("share tables taken:", taken, "generation:", same)
    moved = prometheus.query("writescope_kv_moved_bytes_total")
    assert list(moved.values()) == [0.0], moved
    # A wrong query must not pass for a right one.
    assert prometheus.query("writescope_no_such_metric") == {}

    # What Prometheus says of a dead worker.
    worker.process.kill()
    prometheus.await_query('up{job="worker"} == 0', lambda a: len(a) == 1)
    prometheus.await_query('up{job="controller"} == 1', lambda a: len(a) == 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--controller", required=True)
    parser.add_argument("--client", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", required=True)
    options = parser.parse_args()
    server = find_prometheus(options.work)
    with programs.start_worker(os.path.dirname(options.worker), options.model, "--vram-budget=19MiB",
                               "--ring-size=1MiB", "--host-budget=256MiB", "--prefill-chunk=256",
                               "--max-sequences=2", "--device-threads=1", "--link-gbps=3",
                               "--cut=planned") as worker:
        with programs.start_controller(os.path.dirname(options.controller), worker) as controller:
            targets = {"worker": worker.metrics, "controller": controller.metrics}
            config = os.path.join(options.work, "prometheus.yml")
            with open(config, "w", encoding="utf-8") as file:
                file.write(CONFIG.format(**targets))
            with Prometheus(server, options.work, config) as prometheus:
                check(options, prometheus, worker, controller)
    print("passed")


if __name__ == "__main__":
    main()
