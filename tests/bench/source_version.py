"""Writes source_version.h: the commit and a hash of engine/**, by which a result is tied to code.

    source_version.py ROOT HEADER      writes the header, only if it changes
    source_version.py ROOT             prints the hash of engine/**
"""
import hashlib
import pathlib
import subprocess
import sys


def engine_hash(root):
    digest = hashlib.sha256()
    for path in sorted((root / "engine").rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(root)).encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def commit(root):
    result = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True,
                            text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else "unknown"


def main():
    root = pathlib.Path(sys.argv[1])
    if len(sys.argv) == 2:
        print(engine_hash(root))
        return
    header = pathlib.Path(sys.argv[2])
    text = (f'#pragma once\n\nnamespace writescope::bench {{\n\n'
            f'inline constexpr char kCommit[] = "{commit(root)}";\n'
            f'inline constexpr char kEngineHash[] = "{engine_hash(root)}";\n\n'
            f'}}  // namespace writescope::bench\n')
    if not header.exists() or header.read_text() != text:
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text)


if __name__ == "__main__":
    main()
