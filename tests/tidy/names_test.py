#!/usr/bin/env python3
"""Flags, metrics, files and results that the texts name are there: a text is not built, so nothing else notices."""
import fnmatch
import os
import re
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FOLDERS = ("engine", "server", "controller", "proto", "deploy", "docker", "tests")
RESULTS = "tests/bench/results"


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def tree():
    """Every file and folder of the product, by path from the root."""
    paths = set(os.listdir(ROOT))
    for folder in FOLDERS:
        for at, folders, files in os.walk(os.path.join(ROOT, folder)):
            paths.update(os.path.relpath(os.path.join(at, name), ROOT) for name in folders + files)
    return paths


def is_there(path, paths):
    """A file, a folder, the name that a header and its source have in common, or a pattern of names."""
    path = path.rstrip("/")
    return any(fnmatch.fnmatch(p, path) or fnmatch.fnmatch(p, path + ".*") for p in paths)


def wrong_names(doc, text, paths, flags, metrics):
    """What `text`, which lies at `doc`, names and is not there."""
    wrong = []
    for row in re.findall(r"^\| (`--.*?) \|", text, re.MULTILINE):
        wrong += [flag for flag in re.findall(r"`(--[a-z-]+)`", row) if flag not in flags]
    for metric in re.findall(r"\b(writescope_[a-z_]+[a-z])\b", text):
        if re.sub("^writescope_(controller_)?", "", metric) not in metrics:
            wrong.append(metric)
    folder = os.path.dirname(doc)
    for path in re.findall(r"`((?:%s)/[\w./*-]+)`" % "|".join(FOLDERS), text):
        if not is_there(path, paths):
            wrong.append(path)
    for path in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", text):
        if os.path.normpath(os.path.join(folder, path)) not in paths:
            wrong.append(path)
    for name in re.findall(r"`((?!writescope_)[a-z0-9]+(?:_[a-z0-9]+)*_\*)`", text):
        if not is_there(os.path.join(RESULTS, name), paths):
            wrong.append(name)
    return wrong


def known_flags():
    return set(re.findall(r'"(--[a-z-]+)"', read("server/worker_flags.cc")))


def known_metrics():
    return set(re.findall(r'"([a-z_]+)"', read("server/metrics.cc") + read("controller/metrics.cc")))


class Names(unittest.TestCase):
    def test_texts_name_what_there_is(self):
        paths, flags, metrics = tree(), known_flags(), known_metrics()
        docs = sorted(p for p in paths if p.endswith(".md"))
        self.assertIn("README.md", docs)
        for doc in docs:
            with self.subTest(doc):
                self.assertEqual(wrong_names(doc, read(doc), paths, flags, metrics), [])

    def test_each_kind_is_noticed(self):
        paths = {"README.md", "engine/README.md", "engine/runtime/engine.h", f"{RESULTS}/decode_qwen_h200.json"}
        right = ("| `--vram-budget`, `--listen` | | |\nwritescope_steps_total `engine/runtime/engine` `decode_qwen_*` "
                 "[that](engine/README.md#threads)\n")
        flags, metrics = {"--vram-budget", "--listen"}, {"steps_total"}
        self.assertEqual(wrong_names("README.md", right, paths, flags, metrics), [])
        for name, other in (("--listen", "--listens"), ("writescope_steps_total", "writescope_step_total"),
                            ("engine/runtime/engine", "engine/runtime/engines"),
                            ("decode_qwen_*", "decode_kwen_*"), ("engine/README.md", "engine/READYOU.md")):
            with self.subTest(other):
                text = right.replace(name, other)
                self.assertEqual(wrong_names("README.md", text, paths, flags, metrics), [other])


if __name__ == "__main__":
    unittest.main()
