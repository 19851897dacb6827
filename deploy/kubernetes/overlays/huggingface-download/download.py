#!/usr/bin/env python3
"""Fetches a checkpoint from the Hugging Face Hub into a folder. Standard library only.

usage: download.py --repository=OWNER/NAME --folder=DIR [--revision=main]

Takes configuration, tokenizer and safetensors. A file that is there with the right size and, where the hub
names one, the right SHA-256 is kept; a broken transfer goes on where it stopped. Files appear under their
name only when they are whole. HF_ENDPOINT names another hub, HF_TOKEN is for models that need one.
"""
import argparse
import fnmatch
import hashlib
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

WANTED = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
PIECE_BYTES = 1 << 20
TRIES = 5


class Redirects(urllib.request.HTTPRedirectHandler):
    """The hub sends on to its storage, which is another host: the token is not for it."""

    def redirect_request(self, request, file, code, message, headers, url):
        following = super().redirect_request(request, file, code, message, headers, url)
        if following is not None and urllib.parse.urlsplit(url).netloc != urllib.parse.urlsplit(request.full_url).netloc:
            following.remove_header("Authorization")
        return following


OPENER = urllib.request.build_opener(Redirects)


def open_url(url, first_byte=0):
    request = urllib.request.Request(url, headers={"User-Agent": "writescope-download"})
    if os.environ.get("HF_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {os.environ['HF_TOKEN']}")
    if first_byte:
        request.add_header("Range", f"bytes={first_byte}-")
    return OPENER.open(request, timeout=60)


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def is_whole(path, size, digest):
    return (os.path.exists(path) and os.path.getsize(path) == size
            and (digest is None or sha256(path) == digest))


def fetch(url, path, size, digest):
    """Fetches one file, in as many connections as it takes; raises ValueError when it is not what the hub says."""
    part = path + ".part"
    failures = 0
    while not os.path.exists(part) or os.path.getsize(part) < size:
        at = os.path.getsize(part) if os.path.exists(part) else 0
        try:
            with open_url(url, at) as reply, open(part, "ab") as file:
                # A server that knows no ranges sends all of it again.
                if at and reply.status != 206:
                    file.truncate(0)
                while piece := reply.read(PIECE_BYTES):
                    file.write(piece)
            if size == 0:
                break
        except OSError as error:
            # Refusals do not get better; urllib's errors are of this class too.
            if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                raise
            print(f"{path}: {error}; trying again", flush=True)
        grown = os.path.exists(part) and os.path.getsize(part) > at
        failures = 0 if grown else failures + 1
        if failures == TRIES:
            raise ValueError(f"{url} gave nothing in {TRIES} tries")
        if not grown:
            time.sleep(float(os.environ.get("RETRY_SECONDS", "5")))
    if not is_whole(part, size, digest):
        os.remove(part)
        raise ValueError(f"{url} is not what the hub says it is: {size} bytes, SHA-256 {digest}")
    os.replace(part, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--revision", default="main")
    options = parser.parse_args()
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    revision = urllib.parse.quote(options.revision, safe="")
    try:
        with open_url(f"{hub}/api/models/{options.repository}/revision/{revision}?blobs=true") as reply:
            answer = json.load(reply)
        commit = answer["sha"]
        os.makedirs(options.folder, exist_ok=True)
        for sibling in answer["siblings"]:
            name, size = sibling["rfilename"], sibling["size"]
            # In the repository's own folder: the worker reads no others, and a name must not lead elsewhere.
            if "/" in name or not any(fnmatch.fnmatch(name, pattern) for pattern in WANTED):
                continue
            path = os.path.join(options.folder, name)
            digest = (sibling.get("lfs") or {}).get("sha256")
            if is_whole(path, size, digest):
                print(f"{name}: is there", flush=True)
                continue
            print(f"{name}: {size} bytes", flush=True)
            # By commit, so that a push in between cannot mix two versions.
            fetch(f"{hub}/{options.repository}/resolve/{commit}/{urllib.parse.quote(name)}", path, size, digest)
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"download.py: {options.repository}: {error!r}")
    print(f"{options.repository} at {commit} is in {options.folder}")


if __name__ == "__main__":
    main()
