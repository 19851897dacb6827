"""The virtual environment of the Python client tests: made when it is not there, then entered."""
import filecmp
import os
import shutil
import subprocess
import sys

REQUIREMENTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "requirements.txt")


def enter(folder):
    """Goes on in `folder`'s Python; makes it first unless it has what requirements.txt asks for."""
    python = os.path.join(folder, "bin", "python")
    if os.path.realpath(sys.prefix) == os.path.realpath(folder):
        return
    stamp = os.path.join(folder, "requirements.txt")
    if not (os.path.exists(python) and os.path.exists(stamp)
            and filecmp.cmp(stamp, REQUIREMENTS, shallow=False)):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                        "-r", REQUIREMENTS], check=True)
        shutil.copyfile(REQUIREMENTS, stamp)
    os.execv(python, [python, "-B", *sys.argv])
