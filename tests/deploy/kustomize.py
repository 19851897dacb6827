"""Renders the kustomizations of deploy/kubernetes as `kubectl kustomize` does: as much of kustomize as they
use, and an error for anything else. The test compares with the real one where there is one.
"""
import copy
import hashlib
import os

import yaml

# The key by which Kubernetes merges a list of objects; other lists are replaced.
MERGE_KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name",
              "volumeMounts": "mountPath"}
KNOWN_FIELDS = {"apiVersion", "kind", "resources", "components", "namespace", "images", "configMapGenerator",
                "patches"}
CLUSTER_KINDS = {"Namespace", "PersistentVolume"}


def render(folder):
    """The documents of the kustomization in `folder`."""
    documents = []
    _accumulate(folder, documents)
    _rename_config_maps(documents)
    return documents


def _load(path):
    with open(path, encoding="utf-8") as file:
        # By way of text, so that no two places of a document are one object (anchors).
        return [copy_without_anchors(d) for d in yaml.safe_load_all(file) if d is not None]


def copy_without_anchors(node):
    if isinstance(node, dict):
        return {k: copy_without_anchors(v) for k, v in node.items()}
    if isinstance(node, list):
        return [copy_without_anchors(v) for v in node]
    return node


def _accumulate(folder, documents):
    (config,) = _load(os.path.join(folder, "kustomization.yaml"))
    unknown = set(config) - KNOWN_FIELDS
    if unknown:
        raise ValueError(f"{folder}: this renderer does not know {sorted(unknown)}")
    is_component = config["kind"] == "Component"
    # A component changes what is there already; a resource folder starts from nothing.
    mine = documents if is_component else []
    for name in config.get("resources", []):
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            _accumulate(path, mine)
        else:
            mine.extend(_load(path))
    for name in config.get("components", []):
        _accumulate(os.path.join(folder, name), mine)
    for generator in config.get("configMapGenerator", []):
        mine.append(_config_map(folder, generator))
    for patch in config.get("patches", []):
        if set(patch) != {"path"}:
            raise ValueError(f"{folder}: this renderer knows patches by path only")
        for document in _load(os.path.join(folder, patch["path"])):
            _patch(mine, document, patch["path"])
    for image in config.get("images", []):
        _set_image(mine, image)
    if "namespace" in config:
        for document in mine:
            if document["kind"] not in CLUSTER_KINDS:
                document["metadata"]["namespace"] = config["namespace"]
    if not is_component:
        documents.extend(mine)


def _config_map(folder, generator):
    if set(generator) != {"name", "files"}:
        raise ValueError(f"{folder}: this renderer knows configMapGenerator with name and files only")
    data = {}
    for path in generator["files"]:
        with open(os.path.join(folder, path), encoding="utf-8") as file:
            data[os.path.basename(path)] = file.read()
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data,
            "generated": True}


def _patch(documents, patch, path):
    def key(document):
        return document["apiVersion"], document["kind"], document["metadata"]["name"]
    matches = [d for d in documents if key(d) == key(patch)]
    if len(matches) != 1:
        raise ValueError(f"{path}: {len(matches)} documents are {key(patch)}")
    merged = _merge(matches[0], patch)
    matches[0].clear()
    matches[0].update(merged)


def _merge(base, patch, name=""):
    """A strategic merge, without deletions."""
    if isinstance(base, dict) and isinstance(patch, dict):
        if any(key.startswith("$") for key in patch):
            raise ValueError(f"this renderer knows no {list(patch)}")
        merged = dict(base)
        for key, value in patch.items():
            merged[key] = _merge(base[key], value, key) if key in base else copy.deepcopy(value)
        return merged
    if isinstance(base, list) and isinstance(patch, list) and name in MERGE_KEYS:
        key = MERGE_KEYS[name]
        patches = {item[key]: item for item in patch}
        merged = [_merge(item, patches.pop(item[key])) if item[key] in patches else item for item in base]
        # What is new goes to the front.
        return [copy.deepcopy(item) for item in patches.values()] + merged
    return copy.deepcopy(patch)


def _set_image(documents, image):
    if set(image) != {"name", "newTag"}:
        raise ValueError("this renderer knows images with name and newTag only")
    for container in containers(documents):
        name = container["image"].rpartition(":")[0]
        if name == image["name"]:
            container["image"] = f"{name}:{image['newTag']}"


def pod_specs(documents):
    for document in documents:
        template = document.get("spec", {}).get("template")
        if template:
            yield template["spec"]


def containers(documents):
    for spec in pod_specs(documents):
        yield from spec.get("initContainers", [])
        yield from spec["containers"]


def _rename_config_maps(documents):
    """Generated ConfigMaps get a suffix by their content, so that pods start anew with a new content."""
    names = {}
    for document in documents:
        if document.pop("generated", False):
            old = document["metadata"]["name"]
            content = yaml.safe_dump(document["data"], sort_keys=True).encode()
            names[old] = f"{old}-{hashlib.sha256(content).hexdigest()[:10]}"
            document["metadata"]["name"] = names[old]
    for spec in pod_specs(documents):
        for volume in spec.get("volumes", []):
            sources = [volume, *volume.get("projected", {}).get("sources", [])]
            for source in sources:
                name = source.get("configMap", {}).get("name")
                if name is not None:
                    if name not in names:
                        raise ValueError(f"a pod mounts the ConfigMap {name}, which nothing generates")
                    source["configMap"]["name"] = names[name]
