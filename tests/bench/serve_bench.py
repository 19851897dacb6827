"""Decode of a full batch as clients see it: a worker and its controller under as many streams as it
has places, all programs of one folder, over gRPC, on this machine. The prompts are random tokens.

    serve_bench.py BIN_DIR MODEL BATCHxCONTEXT... [--json=FILE] [--max-tokens=N] [-- WORKER_FLAG...]

What is measured lies between a scrape of the metrics when every stream has had its first
token and the last one before a stream ends. writescope-bench has the same steps without server and clients.
"""
import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import source_version  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_SECONDS = 300
SCRAPE_EVERY_SECONDS = 0.1
LOCAL = ["--listen=127.0.0.1:0", "--control-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"]


class Metrics:
    """One scrape: sums over labels, but for those that are asked for."""

    def __init__(self, address):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        self.at = time.monotonic()
        self._values = [(name, labels or "", float(value)) for name, labels, value in
                        re.findall(r"^(writescope_\w+)(\{.*\})? (\S+)$", text, re.MULTILINE)]

    def __call__(self, name, label=""):
        return sum(value for other, labels, value in self._values
                   if other == f"writescope_{name}" and label in labels)


@contextlib.contextmanager
def running(command, log):
    with open(log, "w", encoding="utf-8") as out, \
            subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def wait_for_worker(process, log):
    """The addresses of generation, control and metrics."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        text = log.read_text(encoding="utf-8")
        if re.search("^READY", text, re.MULTILINE):
            return re.search(r"^LISTENING generation=(\S+) control=(\S+) metrics=(\S+)", text,
                             re.MULTILINE).groups()
        time.sleep(0.1)
    sys.exit(f"the worker did not start:\n{log.read_text(encoding='utf-8')[-2000:]}")


def write_prompts(work, model, batch, context):
    """Random tokens, but for the first and last ones, among which those of special meaning are."""
    config = json.loads((pathlib.Path(model) / "config.json").read_text(encoding="utf-8"))
    for number in range(batch):
        ids = random.Random(number).choices(range(300, config["vocab_size"] * 9 // 10), k=context)
        (work / f"prompt_{number}").write_text(" ".join(map(str, ids)), encoding="utf-8")


def measure(bin_dir, work, addresses, batch, context, max_tokens):
    address, _, metrics_address = addresses
    streams = []
    began = Metrics(metrics_address)
    for number in range(batch):
        streams.append(subprocess.Popen(
            [bin_dir / "writescope", "generate", "--token-ids", f"--file={work}/prompt_{number}",
             "--temperature=0", "--ignore-eos", f"--max-tokens={max_tokens}"],
            env=os.environ | {"WRITESCOPE_ADDRESS": address},
            stdout=open(work / f"answer_{number}", "w", encoding="utf-8")))  # noqa: SIM115
    first = last = None
    shares = []
    while all(stream.poll() is None for stream in streams):
        all_decode = all((work / f"answer_{number}").stat().st_size > 0 for number in range(batch))
        now = Metrics(metrics_address)
        if now("requests_total", 'code="OK"') > began("requests_total", 'code="OK"'):
            break
        if all_decode:
            first = first or now
            last = now
            shares.append(now("cpu_share_ratio"))
        time.sleep(SCRAPE_EVERY_SECONDS)
    failed = [number for number, stream in enumerate(streams) if stream.wait() != 0]
    if failed:
        sys.exit(f"streams {failed} failed")
    if first is None or first is last:
        sys.exit("all streams decoded together for too short a time; --max-tokens sets how long")

    def grown(name, label=""):
        return last(name, label) - first(name, label)

    end = Metrics(metrics_address)
    tokens, seconds = grown("generation_tokens_total"), last.at - first.at
    return {"batch": batch, "context_tokens": context, "seconds": seconds, "tokens": int(tokens),
            "tokens_per_s": tokens / seconds, "step_ms": 1e3 * batch * seconds / tokens,
            "steps": int(grown("steps_total")),
            "steps_in_two": int(grown("ping_pong_steps_total")),
            "cpu_workers": int(last("worker_threads")), "share": sum(shares) / len(shares),
            "prompt_tokens_per_s": batch * context / (first.at - began.at),
            "first_token_s": (end("time_to_first_token_seconds_sum") -
                              began("time_to_first_token_seconds_sum")) / batch,
            "moved_bytes": int(end("kv_moved_bytes_total")),
            "failed_steps": int(end("failed_steps_total"))}


def parse_point(text):
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(K?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not BATCHxCONTEXT, such as 20x8K")
    return int(match[1]), int(match[2]) * (1024 if match[3] else 1)


def main():
    argv, worker_flags = sys.argv[1:], []
    if "--" in argv:
        argv, worker_flags = argv[:argv.index("--")], argv[argv.index("--") + 1:]
    parser = argparse.ArgumentParser()
    parser.add_argument("bin_dir", type=pathlib.Path)
    parser.add_argument("model")
    parser.add_argument("points", nargs="+", type=parse_point)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--machine", default="unknown")
    parser.add_argument("--commit", default=source_version.commit(ROOT))
    args = parser.parse_args(argv)
    rows = []
    for batch, context in args.points:
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            work = pathlib.Path(folder)
            worker = stack.enter_context(running(
                [args.bin_dir / "writescope-worker", f"--model={args.model}",
                 f"--max-sequences={batch}", *LOCAL, *worker_flags], work / "worker.log"))
            addresses = wait_for_worker(worker, work / "worker.log")
            stack.enter_context(running(
                [args.bin_dir / "writescope-controller", f"--worker={addresses[1]}",
                 "--metrics-listen=127.0.0.1:0"], work / "controller.log"))
            write_prompts(work, args.model, batch, context)
            row = measure(args.bin_dir, work, addresses, batch, context, args.max_tokens)
        rows.append({"model": pathlib.Path(args.model).name, **row})
        print(rows[-1], flush=True)
    if args.json:
        command = " ".join(["serve_bench.py", "BIN_DIR", args.model,
                            *(f"{batch}x{context}" for batch, context in args.points),
                            f"--max-tokens={args.max_tokens}", "--", *worker_flags])
        args.json.write_text(json.dumps(
            {"benchmark": "serve", "machine": args.machine, "commit": args.commit,
             "engine_hash": source_version.engine_hash(ROOT), "command": command, "ceilings": {},
             "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
