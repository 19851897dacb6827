#!/usr/bin/env python3
"""Each script says how it is called, and refuses what it does not know before it does anything."""
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PYTHON = (
    "deploy/grafana/make_dashboards.py",
    "deploy/kubernetes/overlays/huggingface-download/download.py",
    "tests/bench/serve_bench.py",
    "tests/deploy/run_dockerfile.py",
    "tests/tidy/run_clang_tidy.py",
)


def shell_scripts():
    for folder in ("deploy", "docker", "tests"):
        for at, _, files in os.walk(os.path.join(ROOT, folder)):
            yield from (os.path.relpath(os.path.join(at, name), ROOT) for name in files if name.endswith(".sh"))


class ScriptsTest(unittest.TestCase):
    def call(self, script, *arguments):
        """In another folder, where nothing may be left."""
        interpreter = [sys.executable, "-B"] if script.endswith(".py") else []
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([*interpreter, os.path.join(ROOT, script), *arguments], cwd=folder, timeout=30,
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True)
            self.assertEqual(os.listdir(folder), [], script)
        return done

    def test_arguments(self):
        scripts = sorted(shell_scripts())
        self.assertGreater(len(scripts), 6)
        for script in (*scripts, *PYTHON):
            with self.subTest(script):
                told = self.call(script, "--help")
                self.assertEqual(told.returncode, 0, told.stderr)
                self.assertIn(os.path.basename(script), told.stdout)
                for wrong in ("--no-such-flag", "no-such-argument"):
                    refused = self.call(script, wrong)
                    self.assertEqual(refused.returncode, 2, refused.stdout + refused.stderr)
                    self.assertIn(os.path.basename(script), refused.stderr)


if __name__ == "__main__":
    unittest.main()
