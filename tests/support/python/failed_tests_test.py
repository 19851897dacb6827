#!/usr/bin/env python3
"""failed_tests.py names the tests of a real CTest report that failed, and why."""
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
TESTS = r"""
add_test(passes "sh" "-c" "echo all.cc:1: Failure; exit 0")
add_test(fails "sh" "-c" "echo before; echo 'some.cc:3: Failure'; echo 'Expected: 1 < 0'; exit 1")
add_test(says_nothing "false")
add_test(takes_too_long "sh" "-c" "printf 'begun \\001\\n'; sleep 20")
set_tests_properties(takes_too_long PROPERTIES TIMEOUT 3)
add_test(is_left_out "sh" "-c" "exit 77")
set_tests_properties(is_left_out PROPERTIES SKIP_RETURN_CODE 77)
add_test(is_not_there "/no/such/program")
"""


class FailedTests(unittest.TestCase):
    def report(self, tests, *flags):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "CTestTestfile.cmake"), "w", encoding="utf-8") as file:
                file.write(tests)
            report = os.path.join(folder, "junit.xml")
            subprocess.run(["ctest", "-j1", "--test-dir", folder, "--output-junit", report],
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            return subprocess.run([sys.executable, "-B", os.path.join(HERE, "failed_tests.py"), report, *flags],
                                  capture_output=True, text=True, check=True).stdout

    def test_names(self):
        self.assertEqual(self.report(TESTS, "--names").split(),
                         ["fails", "says_nothing", "takes_too_long", "is_not_there"])

    def test_reasons(self):
        report = self.report(TESTS)
        self.assertIn("fails\n    some.cc:3: Failure\n    Expected: 1 < 0\n", report)
        self.assertNotIn("before", report)
        self.assertIn("takes_too_long\n    begun", report)

    def test_of_what_passed(self):
        self.assertEqual(self.report('add_test(passes "true")\n'), "")


if __name__ == "__main__":
    unittest.main()
