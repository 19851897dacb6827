#!/usr/bin/env python3
"""The worker starts and answers on a processor with SSE2 and nothing newer, emulated by qemu-user.

usage: oldest_processor_test.py --bin=DIR --model=DIR
Ends with 77, a skip, where there is no qemu-x86_64.
"""
import argparse
import os
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import programs

# The oldest 64-bit processor that qemu has, less the one thing that it has beyond SSE2.
PROCESSOR = "kvm64,-sse3"
PROMPT = "The river was wide, and the"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    qemu = shutil.which("qemu-x86_64")
    if qemu is None:
        print("skipped: no qemu-x86_64")
        return 77
    # What the environment says of the real processor does not hold for the emulated one.
    for name in [n for n in os.environ if n.startswith(("OPENBLAS_", "WRITESCOPE_"))]:
        del os.environ[name]
    worker = programs.Program("worker", [
        qemu, "-cpu", PROCESSOR, os.path.join(options.bin, "writescope-worker"), f"--model={options.model}",
        "--device=cpu", "--vram-budget=32MiB", "--listen=127.0.0.1:0", "--control-listen=127.0.0.1:0",
        "--metrics-listen=127.0.0.1:0"])
    with worker:
        address = worker.await_line(r"^LISTENING generation=(\S+)", 120).group(1)
        worker.await_line(r"isa=generic", 120)
        worker.await_line(r"^READY", 120)
        # A prompt of more than a few tokens, so that large products are met too.
        done = subprocess.run([os.path.join(options.bin, "writescope"), f"--address={address}", "generate",
                               PROMPT * 4, "--max-tokens=4", "--ignore-eos", "--report"],
                              capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr + worker.output()
        assert "max_tokens" in done.stdout + done.stderr, done.stdout + done.stderr
    print(done.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
