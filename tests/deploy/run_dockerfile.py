#!/usr/bin/env python3
"""Carries out docker/Dockerfile without Docker: each stage is a folder, Debian's image a fresh debootstrap,
RUN a chroot. Then worker and controller run in their own images as docker-compose.yml starts them, with the
health checks of the images and a request.

usage: run_dockerfile.py --work=DIR [--cuda=DIR] [--keep=STAGE]... [--run-only]
--cuda=DIR  stands for /usr/local/cuda-13.0 of NVIDIA's image, and has worker-cuda built too (it is not run)
--keep      does not make anew a stage that an earlier run has made
--run-only  the images of an earlier run
Needs root and debootstrap; takes a quarter of an hour and 10 GiB. Run by hand; no part of CI.
"""
import argparse
import fcntl
import os
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import time

import yaml

import dockerfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# What a container has of the kernel.
MOUNTS = ("proc", "sys", "dev")


def say(text):
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def run(*command, **options):
    return subprocess.run(command, check=True, **options)


class Builder:
    def __init__(self, work, cuda, keep):
        self.work, self.cuda, self.keep = work, cuda, keep
        with open(os.path.join(ROOT, "docker", "Dockerfile"), encoding="utf-8") as file:
            self.stages = dockerfile.parse(file.read())
        self.built = {}

    def folder(self, name):
        return os.path.join(self.work, re.sub(r"[^\w.-]", "_", name))

    def base(self, image):
        """The root of an image that others made."""
        folder = self.folder(image)
        if image.startswith("debian:bookworm"):
            if not os.path.exists(os.path.join(folder, "etc", "debian_version")):
                say(f"debootstrap for {image}")
                # This machine's mirror, and what its apt knows about the network; no part of the image.
                mirrors = subprocess.run(["apt-get", "indextargets", "--format", "$(REPO_URI)",
                                          "Created-By: Packages", "Codename: bookworm"], capture_output=True,
                                         text=True, check=True).stdout.split()
                run("debootstrap", "--variant=minbase", "bookworm", folder, *mirrors[:1], stdout=subprocess.DEVNULL)
                shutil.copy("/etc/resolv.conf", folder + "/etc/resolv.conf")
                for name in os.listdir("/etc/apt/apt.conf.d"):
                    path = os.path.join("/etc/apt/apt.conf.d", name)
                    with open(path, encoding="utf-8") as file:
                        if "Acquire::http" in file.read():
                            shutil.copy(path, folder + path)
            return folder
        if image.startswith("nvidia/cuda:") and self.cuda:
            target = os.path.join(folder, "usr", "local")
            os.makedirs(target, exist_ok=True)
            if not os.path.lexists(target + "/cuda-13.0"):
                os.symlink(os.path.abspath(self.cuda), target + "/cuda-13.0")
            return folder
        raise ValueError(f"no stand-in for {image}")

    def build(self, name):
        """The folder of a stage, built with all that it needs."""
        if name not in self.stages:
            return self.base(name)
        if name in self.built:
            return self.built[name]
        stage = self.stages[name]
        folder = self.folder(name)
        if name in self.keep and os.path.isdir(folder):
            self.built[name] = folder
            return folder
        parent = self.build(stage.base)
        say(f"stage {name}")
        shutil.rmtree(folder, ignore_errors=True)
        run("cp", "-a", "--reflink=auto", parent, folder)
        if stage.base.startswith("nvidia/"):
            self.built[name] = folder
            return folder
        environment = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        arguments, directory, shell, user = {}, "/", ["/bin/sh", "-c"], "0:0"
        for one in reversed(dockerfile.bases(self.stages, name)[0]):
            environment.update(one.environment())
            directory = one.last("WORKDIR") or directory
        directory = "/" if stage.last("WORKDIR") is None else directory
        for instruction, value in stage.steps:
            if instruction == "ARG":
                arguments[value[0]] = value[1]
            elif instruction == "SHELL":
                shell = value
            elif instruction == "USER":
                user = value
            elif instruction == "WORKDIR":
                os.makedirs(folder + value, exist_ok=True)
            elif instruction == "COPY":
                self.copy(folder, shlex.split(value))
            elif instruction == "RUN":
                say(f"  RUN {value[:100]}")
                in_root(folder, [*shell, value], {**environment, **arguments}, directory, user)
        self.built[name] = folder
        return folder

    def copy(self, folder, words):
        source_root = None
        if words[0].startswith("--from="):
            source_root = self.build(words.pop(0)[len("--from="):])
        source, target = words
        say(f"  COPY {source} {target}")
        if source_root is not None:
            os.makedirs(folder + target, exist_ok=True)
            run("cp", "-a", "--reflink=auto", source_root + source + "/.", folder + target)
            return
        for path in self.context():
            if source == "." or path == source or path.startswith(source + "/"):
                below = path if source == "." else os.path.relpath(path, source)
                place = os.path.normpath(os.path.join(folder + target, below))
                os.makedirs(os.path.dirname(place), exist_ok=True)
                shutil.copy(os.path.join(ROOT, path), place)

    def context(self):
        """The files that the builder is sent: of .dockerignore's form here, nothing but what follows a '!'."""
        with open(os.path.join(ROOT, ".dockerignore"), encoding="utf-8") as file:
            lines = [line.strip() for line in file if line.strip() and not line.startswith("#")]
        if lines[0] != "*" or not all(line.startswith("!") for line in lines[1:]):
            raise ValueError(".dockerignore has another form than this script knows")
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        wanted = [line[1:] for line in lines[1:]]
        return [f for f in files.splitlines() if any(f == w or f.startswith(w + "/") for w in wanted)]


def command_in_root(folder, command, environment, directory="/", user="0:0", bind=()):
    """A command line that runs `command` in `folder`, with mounts of its own that end with it."""
    mounts = [f"mount --rbind /{m} {shlex.quote(folder)}/{m}" for m in MOUNTS]
    mounts += [f"mount --bind {shlex.quote(a)} {shlex.quote(folder + b)}" for a, b in bind]
    inner = shlex.join(["env", "-i", *[f"{k}={v}" for k, v in environment.items()], "sh", "-c",
                        'cd "$0" && exec "$@"', directory, *command])
    return ["unshare", "--mount", "sh", "-c", " && ".join(
        [*mounts, f"exec chroot --userspec={user} {shlex.quote(folder)} {inner}"])]


def in_root(folder, command, environment, directory="/", user="0:0"):
    log = folder + ".log"
    with open(log, "a", encoding="utf-8") as file:
        done = subprocess.run(command_in_root(folder, command, environment, directory, user), stdout=file,
                              stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        run("tail", "-n", "40", log)
        sys.exit(f"failed with {done.returncode}: {command}")


def up(interface):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", interface.encode(), 1 | 64))  # SIOCSIFFLAGS: up, running.


def container(builder, name, arguments, socket_folder):
    """ENTRYPOINT of an image with these arguments, as its user."""
    stages = builder.stages
    environment = {"PATH": "", "HOME": "/"}
    for one in reversed(dockerfile.bases(stages, name)[0]):
        environment.update(one.environment())
    user = dockerfile.inherited(stages, name, "USER")

    def line(command):
        return command_in_root(builder.folder(name), command, environment, user=user,
                               bind=[(socket_folder, "/run/writescope")])
    return line, [*dockerfile.inherited(stages, name, "ENTRYPOINT"), *arguments]


def await_health(line, check, limit_s=60):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done = subprocess.run(line(check), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
        time.sleep(0.5)
    raise AssertionError(f"{check} fails: {done.stdout}{done.stderr}")


def run_images(builder):
    """In a network of its own, which worker and controller share as in compose."""
    up("lo")
    with open(os.path.join(ROOT, "docker-compose.yml"), encoding="utf-8") as file:
        services = yaml.safe_load(file)["services"]
    sockets = os.path.join(builder.work, "control")
    shutil.rmtree(sockets, ignore_errors=True)
    os.makedirs(sockets)
    os.chown(sockets, 10001, 10001)
    worker, worker_command = container(builder, "worker-cpu", services["worker-cpu"]["command"], sockets)
    control, control_command = container(builder, "controller", services["controller-cpu"]["command"], sockets)
    with open(builder.work + "/worker.log", "w", encoding="utf-8") as worker_log, \
            open(builder.work + "/controller.log", "w", encoding="utf-8") as control_log:
        processes = []
        try:
            for line, command, log in ((control, control_command, control_log), (worker, worker_command, worker_log)):
                processes.append(subprocess.Popen(line(command), stdout=log, stderr=subprocess.STDOUT))
            checks = [dockerfile.inherited(builder.stages, name, "HEALTHCHECK")[1] for name in ("controller", "worker-cpu")]
            await_health(control, checks[0])
            say(f"health of the worker: {await_health(worker, checks[1])}")
            answer = run(*worker(["writescope", "generate", "Fellow citizens of the Senate", "--max-tokens=40",
                                  "--temperature=0", "--report"]), capture_output=True, text=True)
            say(f"an answer: {answer.stdout.strip()!r}\n{answer.stderr.strip()}")
            who = run(*worker(["sh", "-c", "id -u; touch /opt/x 2>&1; true"]), capture_output=True, text=True).stdout
            say(f"user and a write into the image: {who.split()}")
            # They know each other by the socket.
            end = time.monotonic() + 20
            text = ""
            while "writescope_controller_connected 1" not in text and time.monotonic() < end:
                text = run(*control(["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9465; printf 'GET /metrics HTTP/1.0\r\n"
                                     "\r\n' >&3; cat <&3"]), capture_output=True, text=True).stdout
                time.sleep(0.5)
            assert "writescope_controller_connected 1" in text, "the controller found no worker"
            say("the controller is connected through the socket")
        finally:
            # unshare and chroot are replaced by the programs, so these are their processes.
            for process in reversed(processes):
                process.terminate()
            codes = [process.wait(30) for process in reversed(processes)]
    say(f"exit codes of worker and controller after SIGTERM: {codes}")
    assert codes == [0, 0]
    for name in ("worker-cpu", "controller"):
        sizes = [int(subprocess.run(["du", "-sm", builder.folder(f)], capture_output=True, text=True,
                                    check=True).stdout.split()[0]) for f in (name, "runtime")]
        say(f"size of {name}: {sizes[0] - sizes[1]} MiB on top of the base")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True)
    parser.add_argument("--cuda")
    parser.add_argument("--keep", action="append", default=[])
    parser.add_argument("--run-only", action="store_true")
    options = parser.parse_args()
    builder = Builder(os.path.abspath(options.work), options.cuda, options.keep)
    if not options.run_only:
        os.makedirs(builder.work, exist_ok=True)
        for target in ("worker-cpu", "controller", *(["worker-cuda"] if options.cuda else [])):
            builder.build(target)
        own = [sys.executable, "-B", os.path.abspath(__file__), "--run-only", f"--work={builder.work}"]
        sys.exit(subprocess.run(["unshare", "--net", *own], check=False).returncode)
    run_images(builder)
    print("passed")


if __name__ == "__main__":
    main()
