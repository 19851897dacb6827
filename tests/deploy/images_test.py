#!/usr/bin/env python3
"""Dockerfile and docker-compose.yml: linted, valid, in agreement with the programs and with Kubernetes; and
the health checks of the images, run against the programs.

usage: images_test.py --venv=DIR --bin=DIR --model=DIR
"""
import argparse
import os
import re
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "support", "python"))
import venv

PROFILES = {"cpu": ("worker-cpu", "worker-cpu"), "gpu": ("worker-gpu", "worker-cuda")}


def tool(name, *arguments):
    return subprocess.run([os.path.join(os.path.dirname(sys.executable), name), *arguments], capture_output=True,
                          text=True, timeout=120, check=False)


def check_lint(stack):
    path = os.path.join(stack.ROOT, "docker", "Dockerfile")
    done = tool("hadolint", "--failure-threshold=info", path)
    assert done.returncode == 0, done.stdout
    with open(path, encoding="utf-8") as file:
        text = file.read()
    # The linter finds what is wrong.
    wrong = os.path.join(stack.ROOT, "build", "wrong.Dockerfile")
    os.makedirs(os.path.dirname(wrong), exist_ok=True)
    with open(wrong, "w", encoding="utf-8") as file:
        file.write(text.replace("bookworm-20250428-slim", "latest"))
    assert tool("hadolint", "--failure-threshold=info", wrong).returncode != 0
    compose = os.path.join(stack.ROOT, "docker-compose.yml")
    done = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", compose)
    assert done.returncode == 0, done.stdout + done.stderr


def check_stages(dockerfile, stages):
    """What every image that runs has."""
    for name in ("worker-cpu", "worker-cuda", "controller"):
        user = dockerfile.inherited(stages, name, "USER")
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), f"{name} runs as {user}"
        _, base = dockerfile.bases(stages, name)
        assert re.fullmatch(r"debian:bookworm-\d{8}-slim", base), base
        installs = [v for s in dockerfile.bases(stages, name)[0] for i, v in s.steps if i == "RUN" and "apt" in v]
        assert not installs, f"{name} installs packages into the image that runs: {installs}"
        assert dockerfile.inherited(stages, name, "HEALTHCHECK"), name
        assert dockerfile.inherited(stages, name, "ENTRYPOINT"), name


def check_compose(stack, compose, stages, dockerfile, commands, options):
    with open(os.path.join(stack.ROOT, "CMakeLists.txt"), encoding="utf-8") as file:
        version = re.search(r"project\(WriteScope VERSION (\S+)", file.read()).group(1)
    services = compose["services"]
    config = stack.load_yaml("deploy", "prometheus", "prometheus.yml")
    targets = {(d["names"][0], d["port"]) for job in config["scrape_configs"] for d in job["dns_sd_configs"]}
    for profile, (worker_name, target) in PROFILES.items():
        worker, controller = services[worker_name], services[f"controller-{profile}"]
        assert worker["profiles"] == controller["profiles"] == [profile]
        assert worker["build"]["target"] == target and target in stages
        assert worker["image"] == f"writescope-worker:{version}-{target.partition('-')[2]}"
        assert controller["build"]["target"] == "controller" and controller["image"] == f"writescope-controller:{version}"
        # Names of the environment with their defaults.
        arguments = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", a) for a in worker["command"]]
        settings = commands.check(os.path.join(options.bin, "writescope-worker"), arguments, worker_name)
        control = commands.check(os.path.join(options.bin, "writescope-controller"), controller["command"], "controller")
        assert settings["control-listen"] == control["worker"], "the two name different sockets"
        assert controller["network_mode"] == f"service:{worker_name}" and "ports" not in controller
        socket = os.path.dirname(settings["control-listen"][len("unix:"):])
        for service in (worker, controller):
            assert f"control:{socket}" in service["volumes"], service["volumes"]
            assert service["read_only"] and service["cap_drop"] == ["ALL"]
        grace = commands.seconds(worker["stop_grace_period"])
        assert grace > commands.seconds(settings["drain-timeout"]) + commands.seconds(settings["shutdown-grace"])
        names = worker["networks"]["default"]["aliases"]
        ports = {commands.port(settings["metrics-listen"]), commands.port(control["metrics-listen"])}
        assert targets == {("writescope-metrics", p) for p in ports} and "writescope-metrics" in names
        assert worker["ports"] == [f"127.0.0.1:{commands.port(settings['listen'])}:{commands.port(settings['listen'])}"]
        assert worker["ulimits"]["memlock"] == -1
        exposed = {int(p) for p in dockerfile.inherited(stages, target, "EXPOSE").split()}
        assert exposed == {commands.port(settings["listen"]), commands.port(settings["metrics-listen"])}, exposed
        if profile == "gpu":
            (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
            assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]} and settings["device"] == "cuda"
    defaults = dockerfile.inherited(stages, "controller", "CMD")
    commands.check(os.path.join(options.bin, "writescope-controller"), defaults, "CMD of the controller")
    user = dockerfile.inherited(stages, "worker-cpu", "USER").partition(":")[0]
    assert f"uid={user}," in compose["volumes"]["control"]["driver_opts"]["o"]
    for name, service in services.items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port} to everybody"


def check_with_kubernetes(stack, compose, stages, dockerfile):
    """The same images and the same user there."""
    import kustomize
    ours = {s["image"] for s in compose["services"].values()}
    user = int(dockerfile.inherited(stages, "worker-cpu", "USER").partition(":")[0])
    for overlay in ("cpu-demo", "single-gpu", "huggingface-download"):
        documents = kustomize.render(os.path.join(stack.ROOT, "deploy", "kubernetes", "overlays", overlay))
        used = {c["image"] for c in kustomize.containers(documents)}
        assert used - ours <= {"python:3.12.10-slim-bookworm"}, f"{overlay}: images that compose has not: {used - ours}"
        for image in used:
            assert re.search(r":v?\d+\.\d+\.\d+", image), f"{image} is not pinned"
        workers = [s for s in kustomize.pod_specs(documents) if s["containers"][0]["name"] == "worker"]
        assert [s["securityContext"]["runAsUser"] for s in workers] == [user]


def probe(command, environment, old, new):
    """The exit code of a health check with another port in it, and how long it took."""
    command = [part.replace(old, new) for part in command]
    start = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, time.monotonic() - start


def check_probes(stages, dockerfile, options):
    import programs
    environment = {**os.environ, "PATH": options.bin + ":" + os.environ["PATH"]}
    limits, worker_check = dockerfile.inherited(stages, "worker-cpu", "HEALTHCHECK")
    assert worker_check == dockerfile.inherited(stages, "worker-cuda", "HEALTHCHECK")[1]
    _, controller_check = dockerfile.inherited(stages, "controller", "HEALTHCHECK")
    nobody = str(programs.free_port())
    assert probe(worker_check, environment, "50051", nobody)[0] == 4
    assert probe(controller_check, environment, "9465", nobody)[0] != 0
    with programs.start_worker(options.bin, options.model, "--vram-budget=64MiB", "--host-budget=64MiB") as worker:
        port = worker.generation.rpartition(":")[2]
        code, _ = probe(worker_check, environment, "50051", port)
        assert code == 0, code
        # As the kubelet asks for liveness: the process.
        assert probe([*worker_check, "--process"], environment, "50051", port)[0] == 0
        with programs.start_controller(options.bin, worker) as controller:
            port_of_controller = controller.metrics.rpartition(":")[2]
            assert probe(controller_check, environment, "9465", port_of_controller)[0] == 0
        # A worker that does not answer: the probe ends by its own time-out, before Docker ends it.
        worker.process.send_signal(signal.SIGSTOP)
        try:
            code, took = probe(worker_check, environment, "50051", port)
        finally:
            worker.process.send_signal(signal.SIGCONT)
        assert code in (4, 5) and took < float(limits["timeout"].rstrip("s")), (code, took)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--venv", "--bin", "--model"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    venv.enter(options.venv)
    import command_lines as commands
    import dockerfile
    import stack
    options.bin = os.path.abspath(options.bin)
    check_lint(stack)
    with open(os.path.join(stack.ROOT, "docker", "Dockerfile"), encoding="utf-8") as file:
        stages = dockerfile.parse(file.read())
    compose = stack.load_yaml("docker-compose.yml")
    check_stages(dockerfile, stages)
    check_compose(stack, compose, stages, dockerfile, commands, options)
    check_with_kubernetes(stack, compose, stages, dockerfile)
    check_probes(stages, dockerfile, options)
    print("passed")


if __name__ == "__main__":
    main()
