#!/usr/bin/env python3
"""Prints which tests of a JUnit report failed, each with the lines that say why.

A long log's end is what is looked at first, so run.sh prints this there.
  failed_tests.py REPORT [--names]
"""
import argparse
import re
import sys
import xml.etree.ElementTree as ElementTree

# What GoogleTest, unittest, the sanitizers and our own checks begin a complaint with.
COMPLAINT = re.compile(r": Failure$|^(FAIL|ERROR):|Sanitizer:|: runtime error: |^Traceback|CHECK failed|^F\d{4} ")
MAX_LINES = 12  # Of one test
MAX_WIDTH = 200


def failed_tests(report):
    """(name, output) of each test that failed or could not be begun, in the report's order."""
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        # One that skips itself says so by SKIP_RETURN_CODE or SKIP_REGULAR_EXPRESSION_MATCHED.
        not_begun = skipped is not None and not (skipped.get("message") or "").startswith("SKIP_")
        if case.find("failure") is not None or not_begun:
            yield case.get("name"), case.findtext("system-out") or ""


def reason(output):
    """The lines from the first complaint on; without one the last lines."""
    lines = [line[:MAX_WIDTH] for line in output.splitlines() if line.strip()]
    for i, line in enumerate(lines):
        if COMPLAINT.search(line):
            return lines[i:i + MAX_LINES]
    return lines[-MAX_LINES:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report")
    parser.add_argument("--names", action="store_true", help="the names alone, a line each")
    options = parser.parse_args()
    for name, output in failed_tests(options.report):
        print(name)
        if not options.names:
            print("".join(f"    {line}\n" for line in reason(output)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
