#!/usr/bin/env python3
"""The example client for replicas, against two workers behind one target; then one of them goes.

usage: round_robin_test.py --venv=DIR --fake-worker=PROGRAM
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [os.path.join(ROOT, "tests", "e2e"), os.path.join(ROOT, "tests", "support", "python")]
import programs
import venv


def start(program):
    worker = programs.Program("worker", [program])
    worker.generation, worker.metrics = worker.await_line(r"^LISTENING generation=(\S+) .*metrics=(\S+)").groups()
    worker.await_line("^READY")
    return worker


def answered(worker):
    with urllib.request.urlopen(f"http://{worker.metrics}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return sum(float(v) for v in re.findall(r'^writescope_requests_total\{.*code="OK".*\} (\S+)$', text, re.M))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", required=True)
    parser.add_argument("--fake-worker", required=True)
    options = parser.parse_args()
    venv.enter(options.venv)
    import grpc_tools
    from grpc_tools import protoc
    with tempfile.TemporaryDirectory() as stubs, start(options.fake_worker) as one, start(options.fake_worker) as other:
        well_known = os.path.join(os.path.dirname(grpc_tools.__file__), "_proto")
        assert not protoc.main(["protoc", f"-I{ROOT}/proto", f"-I{well_known}", f"--python_out={stubs}",
                                f"--grpc_python_out={stubs}", "writescope/v1/generation.proto"])

        def ask(requests):
            # A list of addresses, where a cluster has a name with several.
            return subprocess.run(
                [sys.executable, "-B", os.path.join(ROOT, "deploy", "kubernetes", "round_robin_client.py"),
                 f"--target=ipv4:{one.generation},{other.generation}", f"--requests={requests}", "--max-tokens=2"],
                env={**os.environ, "PYTHONPATH": stubs}, capture_output=True, text=True, timeout=60, check=False)
        done = ask(12)
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 12, done
        counts = answered(one), answered(other)
        # In turn, but for the first ones while the other connection was made.
        assert sum(counts) == 12 and min(counts) >= 4, counts

        other.process.kill()
        other.process.wait(15)
        done = ask(5)
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 5, done
        assert answered(one) == counts[0] + 5
    print("passed:", counts)


if __name__ == "__main__":
    main()
