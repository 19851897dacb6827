"""Debian's Prometheus server as a child process: unpacked, started, asked."""
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import programs

SKIP = 77


def find_prometheus(work):
    """The server's path: installed, unpacked by an earlier run, or unpacked now. No service starts."""
    work = os.path.abspath(work)
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
    """Runs with the configuration `config`, which is a file; keeps its data in `work`."""

    def __init__(self, path, work, config):
        data = os.path.join(work, "data")
        shutil.rmtree(data, ignore_errors=True)
        self.port = programs.free_port()
        super().__init__("prometheus", [
            path, f"--config.file={config}", f"--storage.tsdb.path={data}",
            f"--web.listen-address=127.0.0.1:{self.port}"])
        self.await_line("Server is ready to receive web requests")

    def get(self, path, **parameters):
        """The `data` of an answer of the HTTP API, /api/v1/PATH."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?" + urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error} {error.read()[:500]}") from error
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, promql):
        """{labels as a string: value} of an instant query."""
        result = self.get("query", query=promql)["result"]
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
