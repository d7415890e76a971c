"""The file system and the user that a container has, made with Linux namespaces instead of a container engine.

The root of the container is that of an image, whose folder the environment variable IMAGE_ROOT names, or else made of
folders of this machine: Python, the checkout, the system's libraries. It is read-only; volumes are mounted into it.
What the Dockerfile sets, its entrypoint and environment, is read there. Takes root, and Linux.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.servers.polling import PATIENCE_SECONDS
from tests.servers.processes import end_process

ROOT = Path(__file__).parents[2]
_FOLDERS = ("/bin", "/etc", "/lib", "/lib64", "/sbin", "/usr", sys.base_prefix, sys.prefix, str(ROOT))
# Each word of the loops is a path; the tests choose them, without spaces. Volumes come before folders, as the checkout
# may be in /tmp.
_SETUP = """
set -e
mkdir -p "$NEW_ROOT"
if [ -n "$IMAGE" ]; then mount --rbind "$IMAGE" "$NEW_ROOT"; else mount -t tmpfs -o mode=755 tmpfs "$NEW_ROOT"; fi
mkdir -p "$NEW_ROOT/proc" "$NEW_ROOT/dev" "$NEW_ROOT/sys" "$NEW_ROOT/home/gradserve"
mount --rbind /proc "$NEW_ROOT/proc"
mount --rbind /dev "$NEW_ROOT/dev"
mount -t tmpfs tmpfs "$NEW_ROOT/sys"
for volume in $VOLUMES; do
    mkdir -p "$NEW_ROOT${volume#*=}"
    mount --bind "${volume%%=*}" "$NEW_ROOT${volume#*=}"
done
for folder in $FOLDERS; do
    mkdir -p "$NEW_ROOT$folder"
    mount --rbind "$folder" "$NEW_ROOT$folder"
    mount -o remount,bind,ro "$NEW_ROOT$folder"
done
for volume in $READ_ONLY; do mount -o remount,bind,ro "$NEW_ROOT$volume"; done
mount -o remount,bind,ro "$NEW_ROOT/sys"
mount -o remount,bind,ro "$NEW_ROOT"
if [ -n "$HOSTS" ]; then mount --bind "$HOSTS" "$NEW_ROOT/etc/hosts"; fi
cd "$NEW_ROOT"
exec chroot . setpriv --reuid "$USER_ID" --regid "$GROUP_ID" --groups "$GROUP_ID" \
    --bounding-set=-all --inh-caps=-all --no-new-privs -- env -i -- "$@"
"""


def can_run() -> bool:
    """Tells whether this machine allows what is needed."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "setpriv"))):
        return False
    return (
        subprocess.run(
            ["unshare", "--mount", "true"], capture_output=True, timeout=PATIENCE_SECONDS, check=False
        ).returncode
        == 0
    )


@dataclass(frozen=True)
class Image:
    """What an image says about its containers."""

    entrypoint: list[str]
    environment: dict[str, str]
    user: int
    group: int
    root: Path | None
    """Its files; None for those of this machine."""


def image() -> Image:
    """Returns the image that the Dockerfile makes."""
    text = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2].replace("\\\n", " ")
    environment = dict(re.findall(r'(\w+)=("[^"]*"|\S+)', re.findall(r"^ENV (.*)$", text, re.MULTILINE)[0]))
    user, group = re.findall(r"^USER (\d+):(\d+)$", text, re.MULTILINE)[0]
    root = os.environ.get("IMAGE_ROOT")
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    environment["PATH"] = environment["PATH"].strip('"').replace("${PATH}", path)
    environment["HOME"] = "/home/gradserve"
    if root is None:
        environment["PATH"] = f"{sys.prefix}/bin:{path}"
        environment["PYTHONPATH"] = f"{ROOT / 'client'}:{ROOT / 'server'}"
    return Image(
        json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0]),
        environment,
        int(user),
        int(group),
        None if root is None else Path(root),
    )


@dataclass(frozen=True)
class Mount:
    """A folder of this machine that a container sees."""

    source: Path
    path: str
    read_only: bool = False


class Container:
    """A process in a root of its own, from the start of which on signals reach it."""

    def __init__(
        self,
        of: Image,
        command: list[str],
        environment: dict[str, str],
        mounts: list[Mount],
        *,
        new_root: Path,
        log: Path,
        hosts: Path | None = None,
    ) -> None:
        self._image = of
        self._environment = [f"{name}={value}" for name, value in {**of.environment, **environment}.items()]
        setup = {
            "PATH": os.environ["PATH"],
            "NEW_ROOT": str(new_root),
            "IMAGE": str(of.root or ""),
            "FOLDERS": "" if of.root else " ".join(dict.fromkeys(_FOLDERS)),
            "VOLUMES": " ".join(f"{mount.source}={mount.path}" for mount in mounts),
            "READ_ONLY": " ".join(mount.path for mount in mounts if mount.read_only),
            "HOSTS": str(hosts or ""),
            "USER_ID": str(of.user),
            "GROUP_ID": str(of.group),
        }
        words = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            _SETUP,
            "sh",
            *self._environment,
            *command,
        ]
        with log.open("ab") as output:
            self.process = subprocess.Popen(words, env=setup, stdout=output, stderr=output)

    def run(self, command: list[str], timeout: float) -> bool:
        """Runs a command beside the process; returns whether it succeeded in time."""
        words = ["nsenter", f"--target={self.process.pid}", "--mount", "--root", "--wd=/"]
        words += [f"--setuid={self._image.user}", f"--setgid={self._image.group}", "env", "-i", *self._environment]
        try:
            done = subprocess.run([*words, *command], capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def stop(self, grace_seconds: float) -> int:
        """Sends SIGTERM, and SIGKILL after a time; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            end_process(self.process)
            return self.process.returncode
