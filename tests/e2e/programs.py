"""Starts the programs for end-to-end tests, on free ports of the loopback address."""
import os
import re
import socket
import subprocess
import threading
import time

START_LIMIT_S = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Program:
    """A child process whose output is kept. Waits for lines of it; ends with the `with` block."""

    def __init__(self, name, command, env=None):
        self.name = name
        self.lines = []
        self._changed = threading.Condition()
        self._closed = False
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        errors="replace", stdin=subprocess.DEVNULL,
                                        env={**os.environ, **(env or {})})
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def await_line(self, pattern, limit_s=START_LIMIT_S):
        """The match of the first line with `pattern`; raises with the output when none comes."""
        end, seen = time.monotonic() + limit_s, 0
        with self._changed:
            while True:
                for line in self.lines[seen:]:
                    match = re.search(pattern, line)
                    if match:
                        return match
                seen = len(self.lines)
                if self._closed or time.monotonic() > end:
                    raise AssertionError(f"{self.name} printed no '{pattern}':\n{self.output()}")
                self._changed.wait(0.5)

    def output(self):
        return "\n".join(self.lines[-60:])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def start_worker(bin_dir, model_dir, *flags):
    """A worker that serves; .generation, .control and .metrics are its addresses."""
    worker = Program("worker", [
        os.path.join(bin_dir, "writescope-worker"), f"--model={model_dir}", "--device=cpu",
        "--listen=127.0.0.1:0", "--control-listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0", *flags])
    try:
        found = worker.await_line(r"^LISTENING generation=(\S+) control=(\S+) metrics=(\S+)")
        worker.generation, worker.control, worker.metrics = found.groups()
        worker.await_line(r"^READY")
    except BaseException:
        worker.__exit__()
        raise
    return worker


def start_controller(bin_dir, worker, *flags):
    """A controller that watches `worker`; .metrics is its address."""
    controller = Program("controller", [
        os.path.join(bin_dir, "writescope-controller"), f"--worker={worker.control}",
        "--metrics-listen=127.0.0.1:0", *flags])
    try:
        controller.metrics = controller.await_line(r"^LISTENING metrics=(\S+)").group(1)
    except BaseException:
        controller.__exit__()
        raise
    return controller
