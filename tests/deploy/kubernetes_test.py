#!/usr/bin/env python3
"""The Kubernetes overlays: rendered, validated against Kubernetes's schemas, and compared with the programs
that they start.

usage: kubernetes_test.py --venv=DIR --bin=DIR --work=DIR
"""
import argparse
import copy
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "support", "python"))
import venv

OVERLAYS = ("cpu-demo", "single-gpu", "huggingface-download")
# The oldest with native sidecars on by default, one in wide use, and the newest that the validator knows.
VERSIONS = ("1.29", "1.32", "1.37")
GIB = 1 << 30


def find(documents, kind, name):
    found = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def compare_with_kubectl(overlay, folder, documents, yaml):
    """Where a kubectl with kustomize 5 is at hand, it renders the same. True if it was."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return False
    version = subprocess.run([kubectl, "version", "--client"], capture_output=True, text=True, timeout=60, check=False)
    if "Kustomize Version: v5" not in version.stdout:
        return False
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr

    def normal(node):
        """Without the suffixes of generated names and the order of documents."""
        text = yaml.safe_dump(node, sort_keys=True)
        return re.sub(r"\b((?:writescope-worker|huggingface-download|prometheus-\w+|grafana-\w+))-[0-9a-z]{10}\b", r"\1",
                      text)
    theirs = sorted(normal(d) for d in yaml.safe_load_all(done.stdout))
    ours = sorted(normal(d) for d in documents)
    for one, other in zip(ours, theirs):
        assert one == other, f"{overlay}: rendered here\n{one}\nby kubectl\n{other}"
    assert len(ours) == len(theirs)
    return True


def validate(documents, where):
    """Problems by the schemas of each version."""
    import kubernetes_validate
    for version in VERSIONS:
        for document in documents:
            if document["apiVersion"].startswith("monitoring.coreos.com/"):
                continue  # Not of Kubernetes; check_pod_monitor looks at it.
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                yield f"{where}, {version}: {document['kind']} {document['metadata']['name']}: {error}"


def check_that_problems_are_found(documents):
    for change in (lambda s: s["spec"]["template"]["spec"]["containers"][0].update(imagee="x"),
                   lambda s: s["spec"]["template"]["spec"].update(terminationGracePeriodSeconds="long"),
                   lambda s: s["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["grpc"].pop("port"),
                   lambda s: s["spec"].pop("selector")):
        broken = copy.deepcopy(find(documents, "StatefulSet", "writescope"))
        change(broken)
        assert list(validate([broken], "")), "a broken StatefulSet is valid"


def check_pod(overlay, documents, options, commands, root):
    """The worker's pod against worker and controller themselves."""
    worker_set = find(documents, "StatefulSet", "writescope")
    pod = worker_set["spec"]["template"]["spec"]
    containers = {c["name"]: c for c in pod["initContainers"] + pod["containers"]}
    worker, controller = containers["worker"], containers["controller"]
    assert controller["restartPolicy"] == "Always", "the controller is no native sidecar"

    # Flags and configuration.
    mounted = next(v["configMap"]["name"] for v in pod["volumes"] if v["name"] == "config")
    config = find(documents, "ConfigMap", mounted)["data"]["worker.conf"]
    os.makedirs(options.work, exist_ok=True)
    path = os.path.join(options.work, f"{overlay}.conf")
    with open(path, "w", encoding="utf-8") as file:
        file.write(config)
    program = os.path.join(options.bin, "writescope-worker")
    settings = commands.check(program, worker["args"], overlay, [("/etc/writescope/worker.conf", path)])
    for key, value in re.findall(r'^([\w-]+)\s*=\s*"?([^"\n]*?)"?$', config, re.M):
        assert settings[key] == value, f"{overlay}: {key} of worker.conf became {settings[key]}"
    control = commands.check(os.path.join(options.bin, "writescope-controller"), controller["args"], overlay)
    assert control["worker"] == settings["control-listen"], "controller and worker name different sockets"
    assert settings["control-listen"].startswith("unix:/run/writescope/")

    # Ports and probes.
    ports = {p["name"]: p["containerPort"] for c in containers.values() for p in c.get("ports", [])}
    assert ports == {"grpc": commands.port(settings["listen"]), "metrics": commands.port(settings["metrics-listen"]),
                     "control-metrics": commands.port(control["metrics-listen"])}, ports
    service = commands.generation_service(root)
    for probe in ("startupProbe", "readinessProbe"):
        assert worker[probe]["grpc"] == {"port": ports["grpc"], "service": service}, worker[probe]
    assert worker["livenessProbe"]["grpc"] == {"port": ports["grpc"]}, "liveness is about the process"
    for probe in ("startupProbe", "livenessProbe"):
        assert controller[probe]["httpGet"] == {"path": "/healthz", "port": "control-metrics"}
    assert "readinessProbe" not in controller, "the pod's readiness is the worker's"
    assert worker["readinessProbe"]["timeoutSeconds"] >= 5
    for container in (worker, controller):
        assert settings["listen"].startswith("0.0.0.0:") and control["metrics-listen"].startswith("0.0.0.0:")
        mounts = {m["name"] for m in container["volumeMounts"]}
        assert "control" in mounts, container["name"]
    volumes = {v["name"] for v in pod["volumes"]}
    volumes |= {t["metadata"]["name"] for t in worker_set["spec"].get("volumeClaimTemplates", [])}
    for name, container in containers.items():
        missing = {m["name"] for m in container["volumeMounts"]} - volumes
        assert not missing, f"{overlay}: {name} mounts {missing}"

    # The end of a pod: preStop and drain fit into the grace, with half a minute to free the memory.
    sleep = int(worker["lifecycle"]["preStop"]["exec"]["command"][1])
    need = sleep + commands.seconds(settings["drain-timeout"]) + commands.seconds(settings["shutdown-grace"]) + 30
    assert pod["terminationGracePeriodSeconds"] >= need, f"{overlay}: the grace is shorter than {need} s"
    check_resources(overlay, containers, settings, options, commands, root)
    check_security(pod)


def check_resources(overlay, containers, settings, options, commands, root):
    """Guaranteed QoS with whole CPUs, and memory by the plan."""
    for name, container in containers.items():
        resources = container["resources"]
        assert resources["requests"] == resources["limits"], f"{overlay}: {name} is not Guaranteed"
        assert set(resources["limits"]) >= {"cpu", "memory"}, f"{overlay}: {name}"
        gpus = resources["limits"].get("nvidia.com/gpu", 0)
        assert gpus == (1 if name == "worker" and settings["device"] == "cuda" else 0), f"{overlay}: {name}"
    limits = containers["worker"]["resources"]["limits"]
    assert re.fullmatch(r"\d+", limits["cpu"]), f"{overlay}: {limits['cpu']} CPUs are not whole"
    memory = commands.size_bytes(limits["memory"])
    vram, host = commands.size_bytes(settings["vram-budget"]), commands.size_bytes(settings["host-budget"])
    if settings["device"] == "cpu":
        need, most = vram + host + GIB // 4, 4 * (vram + host)
    else:
        need, most = host + 8 * GIB, host + 32 * GIB
        done = commands.run(os.path.join(options.bin, "writescope"), "plan",
                            os.path.join(root, "deploy/model-shapes/qwen3-30b-a3b"),
                            os.path.join(root, "deploy/machine-profiles/h200-pcie5.json"),
                            f"--weights={settings['weights']}", f"--vram-budget={settings['vram-budget']}",
                            f"--host-budget={settings['host-budget']}", f"--batch={settings['max-sequences']}")
        assert done.returncode == 0, done.stderr
        device_kv = float(re.search(r"^device .* kv ([\d.]+) GiB", done.stdout, re.M).group(1))
        planned = float(re.search(r"^host +([\d.]+) GiB", done.stdout, re.M).group(1))
        assert device_kv > 1, f"{overlay}: the plan leaves {device_kv} GiB of KV on the device"
        assert abs(planned * GIB - host) < GIB, (planned, host)
        weights = re.search(r"weights ([\d.]+ GiB)", done.stdout).group(1)
        with open(os.path.join(root, "deploy/kubernetes/components/gpu/worker.conf"), encoding="utf-8") as file:
            assert f"weights {weights}" in file.read(), f"worker.conf does not name the plan's {weights} of weights"
    assert need <= memory <= most, f"{overlay}: {limits['memory']} of memory for a plan that needs {need / GIB:.1f} GiB"


def check_security(pod, read_only=True):
    """What the namespace enforces (the standard "restricted"), and more."""
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] > 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        assert name not in pod
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"emptyDir", "configMap", "projected", "persistentVolumeClaim"}, kinds
    for container in pod.get("initContainers", []) + pod["containers"]:
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}, container["name"]
        assert own.get("readOnlyRootFilesystem") or not read_only, container["name"]


def check_surroundings(overlay, documents, stack):
    """Services, policy, budget and monitoring name what there is."""
    worker_set = find(documents, "StatefulSet", "writescope")
    labels = worker_set["spec"]["template"]["metadata"]["labels"]
    pod = worker_set["spec"]["template"]["spec"]
    ports = {p["name"]: p["containerPort"] for c in pod["initContainers"] + pod["containers"] for p in c.get("ports", [])}
    service, metrics = find(documents, "Service", "writescope"), find(documents, "Service", "writescope-metrics")
    budget, policy = find(documents, "PodDisruptionBudget", "writescope"), find(documents, "NetworkPolicy", "writescope")
    for one in (service, metrics):
        assert one["spec"]["clusterIP"] == "None", "not headless"
        assert one["spec"]["selector"].items() <= labels.items()
        for port in one["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"], port
    assert worker_set["spec"]["serviceName"] == "writescope"
    assert [p["name"] for p in service["spec"]["ports"]] == ["grpc"]
    assert metrics["spec"]["publishNotReadyAddresses"] and not service["spec"].get("publishNotReadyAddresses")
    assert budget["spec"]["maxUnavailable"] == 1 and "minAvailable" not in budget["spec"]
    for selector in (budget["spec"]["selector"], policy["spec"]["podSelector"]):
        assert selector["matchLabels"].items() <= labels.items()
    # The control port is closed: ingress is for requests and metrics.
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    allowed = {p["port"] for rule in policy["spec"]["ingress"] for p in rule["ports"]}
    assert allowed == set(ports.values()), allowed
    assert "50052" not in str(documents), "the TCP control port is in use"
    outside = {p["port"] for rule in policy["spec"]["egress"] for p in rule["ports"]}
    assert outside == ({53, 443} if overlay == "huggingface-download" else set()), outside

    # Prometheus finds the metrics, Grafana finds Prometheus.
    config = stack.load_yaml("deploy", "prometheus", "prometheus.yml")
    found = {(d["names"][0], d["port"]) for job in config["scrape_configs"] for d in job["dns_sd_configs"]}
    assert found == {("writescope-metrics", p["port"]) for p in metrics["spec"]["ports"]}, found
    source = stack.load_yaml("deploy", "grafana", "provisioning", "datasources", "prometheus.yml")["datasources"][0]
    prometheus = find(documents, "Service", "prometheus")
    assert source["url"] == f"http://prometheus:{prometheus['spec']['ports'][0]['port']}"
    scraper = find(documents, "Deployment", "prometheus")["spec"]["template"]["metadata"]["labels"]
    peers = [f["podSelector"]["matchLabels"] for rule in policy["spec"]["ingress"] for f in rule["from"]]
    assert scraper in peers, "the policy keeps Prometheus out"
    for rules in config["rule_files"]:
        assert os.path.dirname(rules) == "rules"
    mounted = str(find(documents, "Deployment", "prometheus")["spec"]["template"]["spec"]["volumes"])
    for name in os.listdir(os.path.join(stack.PROMETHEUS_FOLDER, "rules")):
        assert f"rules/{name}" in mounted, f"{name} is not mounted"


def check_pod_monitor(stack, documents):
    monitor = stack.load_yaml("deploy", "kubernetes", "components", "pod-monitor", "pod-monitor.yaml")
    template = find(documents, "StatefulSet", "writescope")["spec"]["template"]
    pod = template["spec"]
    ports = {p["name"] for c in pod["initContainers"] + pod["containers"] for p in c.get("ports", [])}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    endpoints = monitor["spec"]["podMetricsEndpoints"]
    assert {e["port"] for e in endpoints} == ports - {"grpc"}
    jobs = {j["job_name"] for j in stack.load_yaml("deploy", "prometheus", "prometheus.yml")["scrape_configs"]}
    given = {r["replacement"] for e in endpoints for r in e["relabelings"] if r["targetLabel"] == "job"}
    assert given == jobs, "rules name other jobs"
    # The fields that the operator's CRD has.
    for endpoint in endpoints:
        assert set(endpoint) <= {"port", "path", "interval", "scrapeTimeout", "relabelings", "metricRelabelings"}
        for relabeling in endpoint["relabelings"]:
            assert set(relabeling) <= {"sourceLabels", "targetLabel", "regex", "replacement", "action", "separator"}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--venv", "--bin", "--work"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    venv.enter(options.venv)
    import yaml

    import command_lines as commands
    import kustomize
    import stack
    compared = []
    for overlay in OVERLAYS:
        folder = os.path.join(stack.ROOT, "deploy", "kubernetes", "overlays", overlay)
        documents = kustomize.render(folder)
        compared.append(compare_with_kubectl(overlay, folder, documents, yaml))
        problems = list(validate(documents, overlay))
        assert not problems, "\n".join(problems)
        for document in documents:
            cluster = document["kind"] in kustomize.CLUSTER_KINDS
            assert cluster != (document["metadata"].get("namespace") == "writescope"), document["metadata"]
        check_pod(overlay, documents, options, commands, stack.ROOT)
        check_surroundings(overlay, documents, stack)
        for spec in kustomize.pod_specs(documents):
            check_security(spec, read_only=False)
    check_that_problems_are_found(documents)
    check_pod_monitor(stack, documents)
    print("passed;", "kubectl renders the same" if all(compared) else "no kubectl to compare the rendering with")


if __name__ == "__main__":
    main()
