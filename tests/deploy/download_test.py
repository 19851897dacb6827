#!/usr/bin/env python3
"""The checkpoint download of the Kubernetes overlay against a small hub on the loopback address.

usage: download_test.py
"""
import hashlib
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "deploy", "kubernetes", "overlays",
                      "huggingface-download", "download.py")
COMMIT = "0123abcd" * 5
FILES = {"config.json": b'{"a": 1}', "model-00001-of-00002.safetensors": bytes(range(256)) * 20000,
         "model-00002-of-00002.safetensors": b"weights" * 1000, "tokenizer.json": b"{}", "README.md": b"no",
         "original/consolidated.safetensors": b"no", "empty.json": b""}


class Hub(http.server.ThreadingHTTPServer):
    """Answers as the Hub does: a list with sizes and digests, files by commit, weights on another host."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.seen = []           # (path, Range, Authorization) of every request
        self.cut_once = set()    # files of which the first answer ends in the middle
        self.wrong_digest = None
        self.token = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Answer(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        hub = self.server
        hub.seen.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        if hub.token and not self.path.startswith("/storage/") and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.send_error(401)
        if self.path == "/api/models/owner/name/revision/refs%2Fpr%2F1?blobs=true":
            siblings = []
            for name, content in FILES.items():
                sibling = {"rfilename": name, "size": len(content)}
                if name.endswith("safetensors"):
                    digest = hashlib.sha256(content if name != hub.wrong_digest else b"other").hexdigest()
                    sibling["lfs"] = {"sha256": digest, "size": len(content)}
                siblings.append(sibling)
            return self.reply(json.dumps({"sha": COMMIT, "siblings": siblings}).encode())
        start = f"/owner/name/resolve/{COMMIT}/"
        if self.path.startswith(start) and self.path.endswith("safetensors"):
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{hub.server_port}/storage/{self.path[len(start):]}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        for prefix in (start, "/storage/"):
            if self.path.startswith(prefix) and self.path[len(prefix):] in FILES:
                return self.reply(FILES[self.path[len(prefix):]], self.path[len(prefix):])
        return self.send_error(404)

    def reply(self, content, name=None):
        first = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        self.send_response(206 if first else 200)
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        if name in self.server.cut_once:
            self.server.cut_once.remove(name)
            self.wfile.write(content[first:len(content) // 2])
            self.close_connection = True
            return
        self.wfile.write(content[first:])


def download(hub, folder, token=None):
    environment = {**os.environ, "HF_ENDPOINT": hub.url(), "RETRY_SECONDS": "0.1"}
    environment.pop("HF_TOKEN", None)
    if token:
        environment["HF_TOKEN"] = token
    return subprocess.run([sys.executable, "-B", SCRIPT, "--repository=owner/name", "--revision=refs/pr/1",
                           f"--folder={folder}"], env=environment, capture_output=True, text=True, timeout=60,
                          check=False)


def expect_whole(folder):
    found = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            found[name] = file.read()
    assert found == {n: c for n, c in FILES.items() if "/" not in n and n != "README.md"}, sorted(found)


def main():
    large = "model-00001-of-00002.safetensors"
    with tempfile.TemporaryDirectory() as top:
        hub = Hub()
        hub.cut_once.add(large)
        folder = os.path.join(top, "model")
        done = download(hub, folder)
        assert done.returncode == 0, done.stderr
        expect_whole(folder)
        ranges = [r for path, r, _ in hub.seen if path == "/storage/" + large]
        assert ranges == [None, f"bytes={len(FILES[large]) // 2}-"], f"a broken transfer did not go on: {ranges}"

        # Again: nothing is fetched but what is not right.
        with open(os.path.join(folder, large), "r+b") as file:
            file.write(b"broken")
        hub.seen.clear()
        done = download(hub, folder)
        assert done.returncode == 0, done.stderr
        expect_whole(folder)
        fetched = [path for path, _, _ in hub.seen if path.startswith("/storage/")]
        assert fetched == ["/storage/" + large], fetched

        # Not what the hub says: no file of that name is left.
        other = os.path.join(top, "other")
        hub.wrong_digest = large
        done = download(hub, other)
        assert done.returncode != 0 and "not what the hub says" in done.stderr, done
        assert large not in os.listdir(other) and large + ".part" not in os.listdir(other)
        hub.wrong_digest = None

        # The token goes to the hub and not to the storage.
        hub.token = "secret"
        done = download(hub, os.path.join(top, "gated"))
        assert done.returncode != 0 and "401" in done.stderr, done
        hub.seen.clear()
        done = download(hub, os.path.join(top, "gated"), token="secret")
        assert done.returncode == 0, done.stderr
        assert all((a == "Bearer secret") != p.startswith("/storage/") for p, _, a in hub.seen), hub.seen
    print("passed")


if __name__ == "__main__":
    main()
