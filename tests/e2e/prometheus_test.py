#!/usr/bin/env python3
"""A real Prometheus server scrapes worker and controller; the split is read back with PromQL.

usage: prometheus_test.py --worker=PROGRAM --controller=PROGRAM --client=PROGRAM --model=DIR --work=DIR
Ends with 77, a skip, where Debian's package of Prometheus cannot be had.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import programs

SKIP = 77
CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 400ms}}
scrape_configs:
- job_name: worker
  static_configs: [{{targets: ['{worker}']}}]
- job_name: controller
  static_configs: [{{targets: ['{controller}']}}]
"""


def find_prometheus(work):
    """The server's path: installed, unpacked by an earlier run, or unpacked now. No service starts."""
    unpacked = os.path.join(work, "package", "usr", "bin", "prometheus")
    for path in (shutil.which("prometheus"), unpacked):
        if path and os.path.exists(path):
            return path
    os.makedirs(work, exist_ok=True)
    log = []
    # Package lists may be missing or old, and refreshing them takes root.
    for command in (["apt-get", "-qq", "download", "prometheus"], ["apt-get", "-qq", "update"],
                    ["apt-get", "-qq", "download", "prometheus"]):
        try:
            done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=120)
            log.append(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        except (FileNotFoundError, subprocess.TimeoutExpired) as error:
            log.append(f"{' '.join(command)}: {error}")
        found = [n for n in os.listdir(work) if n.startswith("prometheus_") and n.endswith(".deb")]
        if found:
            subprocess.run(["dpkg", "-x", found[0], "package"], cwd=work, check=True)
            return unpacked
    print("SKIPPED: NO PROMETHEUS SERVER. Nothing here was tested. It is not installed, and:\n"
          + "\n".join(log), file=sys.stderr)
    sys.exit(SKIP)


class Prometheus(programs.Program):
    def __init__(self, path, work, targets):
        config = os.path.join(work, "prometheus.yml")
        with open(config, "w", encoding="utf-8") as file:
            file.write(CONFIG.format(**targets))
        data = os.path.join(work, "data")
        shutil.rmtree(data, ignore_errors=True)
        self.port = programs.free_port()
        super().__init__("prometheus", [
            path, f"--config.file={config}", f"--storage.tsdb.path={data}",
            f"--web.listen-address=127.0.0.1:{self.port}"])
        self.await_line("Server is ready to receive web requests")

    def query(self, promql):
        """{labels as a string: value} of an instant query."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": promql})
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{promql}: {error} {error.read()[:500]}") from error
        assert answer["status"] == "success", answer
        result = answer["data"]["result"]
        return {",".join(f"{k}={v}" for k, v in sorted(r["metric"].items())): float(r["value"][1])
                for r in result}

    def await_query(self, promql, holds, limit_s=20):
        """The first answer of which `holds` is true."""
        end, answer = time.monotonic() + limit_s, None
        while time.monotonic() < end:
            answer = self.query(promql)
            if holds(answer):
                return answer
            time.sleep(0.2)
        raise AssertionError(f"{promql} stayed at {answer}\n{self.output()}")


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
            with Prometheus(server, options.work, targets) as prometheus:
                check(options, prometheus, worker, controller)
    print("passed")


if __name__ == "__main__":
    main()
