"""Command lines in manifests, against the programs themselves."""
import os
import re
import subprocess


def run(program, *arguments):
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def flags_of(program, *subcommand):
    """The flags that --help lists."""
    done = run(program, *subcommand, "--help")
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"(--[a-z][\w-]*)", done.stdout))


def check(program, arguments, where, replace=()):
    """The program takes these arguments; returns the configuration that it makes of them, {flag: value}.
    `replace` are pairs for what is only there in a container."""
    known = flags_of(program)
    for argument in arguments:
        flag = argument.partition("=")[0]
        assert flag in known, f"{where}: {os.path.basename(program)} has no {flag}"
    for old, new in replace:
        arguments = [argument.replace(old, new) for argument in arguments]
    done = run(program, *arguments, "--print-config")
    assert done.returncode == 0, f"{where}: {done.stderr}{done.stdout}"
    return {key.strip(): value.strip().strip('"')
            for key, _, value in (line.partition("=") for line in done.stdout.splitlines())}


def seconds(text):
    """2m, 150s, 1m30s."""
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    assert parts and any(parts.groups()), text
    return sum(int(value or 0) * unit for value, unit in zip(parts.groups(), (3600, 60, 1)))


def size_bytes(text):
    """96GiB as the worker writes it, 112Gi as Kubernetes does."""
    number, unit = re.fullmatch(r"([\d.]+)\s*(?:([KMGT])i(?:B)?)?", text).groups()
    return int(float(number) * 1024 ** ("KMGT".index(unit) + 1 if unit else 0))


def port(address):
    return int(address.rpartition(":")[2])


def generation_service(root):
    """The full name of the service that probes ask about, from the proto."""
    with open(os.path.join(root, "proto", "writescope", "v1", "generation.proto"), encoding="utf-8") as file:
        text = file.read()
    return re.search(r"^package (\S+);", text, re.M).group(1) + "." + re.search(r"^service (\w+)", text, re.M).group(1)
