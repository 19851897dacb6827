"""Which arguments deploy/quickstart.sh takes. It ends where it has taken them: its mktemp is ours."""
import os
import subprocess
import sys
import tempfile
import unittest

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "deploy", "quickstart.sh")
TAKEN, REFUSED = 33, 2


class QuickstartTest(unittest.TestCase):
    def run_script(self, *arguments, random=None):
        with tempfile.TemporaryDirectory() as folder:
            mktemp = os.path.join(folder, "mktemp")
            with open(mktemp, "w", encoding="utf-8") as file:
                file.write(f"#!/bin/sh\nexit {TAKEN}\n")
            os.chmod(mktemp, 0o755)
            environment = {**os.environ, "PATH": folder + os.pathsep + os.environ["PATH"]}
            if random is not None:
                environment["BASH_ENV"] = os.path.join(folder, "start")
                with open(environment["BASH_ENV"], "w", encoding="utf-8") as file:
                    file.write(f"unset RANDOM\nRANDOM={random}\n")
            return subprocess.run(["bash", SCRIPT, *arguments], env=environment, check=False,
                                  capture_output=True, text=True, timeout=60)

    def test_whatever_the_seed_is_by_default_it_is_one(self):
        for random in (0, 32767):
            result = self.run_script(random=random)
            self.assertEqual(result.returncode, TAKEN, result.stderr)

    def test_arguments_are_taken(self):
        for argument in ("--seed=0", "--seed=999999999", "--tokens=8000", "--tokens=32000",
                         "--fact=Lima=40718", "--keep", "--no-install"):
            result = self.run_script(argument)
            self.assertEqual(result.returncode, TAKEN, argument + result.stderr)

    def test_wrong_ones_are_refused(self):
        for argument in ("--seed=09", "--seed=1234567890", "--seed=-1", "--tokens=7999", "--tokens=32001",
                         "--tokens=08000", "--tokens=99999999999999999999", "--fact=lima=4", "--fast"):
            result = self.run_script(argument)
            self.assertEqual(result.returncode, REFUSED, argument + result.stderr)
            self.assertIn(argument.split("=")[0], result.stderr)
            self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
