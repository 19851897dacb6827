#!/usr/bin/env python3
"""Runs clang-tidy over the .cc files of some folders, and remembers which files were clean.

A file's result holds as long as the file, every header of ours that it reaches, its compile command,
.clang-tidy and clang-tidy itself stay the same.
"""
import argparse
import concurrent.futures
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.M)
# The compile commands are g++'s: what clang does not know of them is no finding.
EXTRA = ["--extra-arg=-Wno-unknown-warning-option", "--extra-arg=-Qunused-arguments"]
# The analyzer looks at this many states of one function, a third of its default, as its own quick mode
# does: the whole run takes a third less.
for word in ["-Xclang", "-analyzer-config", "-Xclang", "max-nodes=75000"]:
    EXTRA.append("--extra-arg=" + word)


def reached_files(source, include_folders):
    """`source` and all it includes of ours, generated headers too, sorted."""
    found, waiting = set(), [source]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        with open(path, encoding="utf-8", errors="replace") as file:
            for name in INCLUDE.findall(file.read()):
                waiting += [p for p in (os.path.join(f, name) for f in include_folders) if os.path.isfile(p)]
    return sorted(found)


def key_of(entry, version, build):
    arguments = shlex.split(entry["command"])
    folders = [a[2:] for a in arguments if a.startswith("-I")]
    folders += [b for a, b in zip(arguments, arguments[1:]) if a == "-isystem"]
    folders = [f for f in folders if f.startswith((ROOT, build))]
    digest = hashlib.sha256()
    # A compiler cache in front changes nothing.
    command = [os.path.basename(a) if a.startswith("/usr/") else a for a in arguments]
    command = [a for a in command if a != "ccache"]
    for part in [version, *EXTRA, *command]:
        digest.update(part.encode() + b"\0")
    for path in [os.path.join(ROOT, ".clang-tidy"), *reached_files(entry["file"], folders)]:
        with open(path, "rb") as file:
            digest.update(path.encode() + b"\0" + hashlib.sha256(file.read()).digest())
    return digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", default="build/release")
    parser.add_argument("--cache", default="build/tidy-cache")
    parser.add_argument("--clang-tidy", default="clang-tidy-14")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("folders", nargs="+")
    options = parser.parse_args()

    build = os.path.abspath(options.build)
    cache = os.path.abspath(options.cache)
    commands = os.path.join(build, "compile_commands.json")
    if not os.path.exists(commands):
        parser.error(f"there is no {commands}: configure first")
    with open(commands, encoding="utf-8") as file:
        entries = {e["file"]: e for e in json.load(file)}
    wanted = tuple(os.path.join(ROOT, f) + os.sep for f in options.folders)
    entries = [e for path, e in sorted(entries.items()) if path.startswith(wanted) and path.endswith(".cc")]
    if not entries:
        parser.error(f"no .cc of {options.folders} in {commands}: was it configured?")
    os.makedirs(cache, exist_ok=True)
    version = subprocess.run([options.clang_tidy, "--version"], capture_output=True, text=True,
                             check=True).stdout

    def check(entry):
        clean = os.path.join(cache, key_of(entry, version, build))
        name = os.path.relpath(entry["file"], ROOT)
        if os.path.exists(clean):
            return name, True, ""
        done = subprocess.run([options.clang_tidy, "-p", build, "--quiet", *EXTRA, entry["file"]],
                              capture_output=True, text=True)
        if done.returncode == 0:
            with open(clean, "w", encoding="utf-8") as file:
                file.write(name + "\n")
            return name, False, ""
        return name, False, done.stdout + done.stderr or f"exit status {done.returncode}"

    num_cached, bad = 0, []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for name, cached, report in pool.map(check, entries):
            num_cached += cached
            if report:
                bad.append(name)
                print(report, flush=True)
    print(f"clang-tidy: {len(entries)} files, {num_cached} of them known to be clean, {len(bad)} with findings"
          + "".join(f"\n  {name}" for name in bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
