"""A small kubelet: runs the pods of rendered manifests on this machine, with their probes, volumes and time to stop."""

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2

from gradserve_testing.server_process import free_ports
from tests.kubernetes.machine import Container, Image, Mount, image
from tests.kubernetes.manifests import Manifest
from tests.servers.polling import eventually

_DEFAULTS = {"periodSeconds": 10, "timeoutSeconds": 1, "failureThreshold": 3, "initialDelaySeconds": 0}
_LOOK_SECONDS = 0.02
_UNITS = {"": 1, "Mi": 1 << 20, "Gi": 1 << 30}
_CPU_PERIOD = 100_000


@dataclass
class Cluster:
    """What pods are made of beside their manifests.

    Pods share the network of this machine: each port of a manifest becomes a free one, wherever it is written.
    """

    folder: Path
    ports: dict[int, int]
    config_maps: dict[str, dict[str, str]] = field(default_factory=dict)
    secrets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for all containers, beside their own."""

    @classmethod
    def with_ports(cls, folder: Path, *ports: int) -> Self:
        return cls(folder, dict(zip(ports, free_ports(len(ports)), strict=True)))

    def apply(self, manifests: list[Manifest]) -> None:
        """Takes the settings among manifests."""
        for manifest in manifests:
            if manifest["kind"] == "ConfigMap":
                self.config_maps[manifest["metadata"]["name"]] = manifest["data"]

    def with_real_ports(self, text: str) -> str:
        for port, real in self.ports.items():
            text = text.replace(f":{port}", f":{real}")
        return text


class Probe:
    """A probe on its schedule: counts failures in a row."""

    def __init__(self, spec: dict[str, Any], ask: Callable[[dict[str, Any], float], bool], speed: float) -> None:
        self._spec = {**_DEFAULTS, **spec}
        self._ask = ask
        self._speed = speed
        self._next = time.monotonic() + self._spec["initialDelaySeconds"] / speed
        self.failures = 0

    @property
    def has_failed(self) -> bool:
        return bool(self.failures >= self._spec["failureThreshold"])

    def look(self) -> bool | None:
        """Asks if it is time to; returns what it saw."""
        if time.monotonic() < self._next:
            return None
        seen = self._ask(self._spec, max(self._spec["timeoutSeconds"] / self._speed, 1.0))
        self.failures = 0 if seen else self.failures + 1
        self._next = time.monotonic() + self._spec["periodSeconds"] / self._speed
        return seen


class Pod:
    """A pod of a StatefulSet or of a Job, on this machine, from the start of the block to its end.

    Attributes:
        events: What happened, in order: started, ready, unready, killed, stopped N (the exit status), completed.
        container: The process that runs now, or ran last.
        is_ready: What the readiness probe says.
    """

    def __init__(
        self,
        name: str,
        template: Manifest,
        cluster: Cluster,
        *,
        claims: Path,
        speed: float = 1,
        completion_index: int | None = None,
        pod_index: int | None = None,
    ) -> None:
        """Takes the pod's template.

        Args:
            name: A name for the pod's folder.
            template: The template.
            cluster: What it refers to.
            claims: Where persistent volumes are, which outlive pods.
            speed: How much faster than written all times of probes are, and the time to stop after they have failed.
                A container has a second at least to answer a probe.
            completion_index: The pod's number, in an indexed Job.
            pod_index: The pod's number, in a StatefulSet.
        """
        self._spec = template["spec"]
        (self._definition,) = self._spec["containers"]
        self._cluster = cluster
        self._image: Image = image()
        self._folder = cluster.folder / name
        self._claims = claims
        self._speed = speed
        self._fields = {
            "metadata.annotations['batch.kubernetes.io/job-completion-index']": completion_index,
            "metadata.labels['apps.kubernetes.io/pod-index']": pod_index,
        }
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kubelet-{name}")
        self.events: list[str] = []
        self.is_ready = False
        self.container: Container

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def wait_for(self, event: str, count: int = 1) -> None:
        """Waits until something has happened a number of times."""
        try:
            eventually(lambda: self.events.count(event) >= count)
        except AssertionError as error:
            raise AssertionError(f"{event} ({count}) did not happen, only {self.events}: {self.log}") from error

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Deletes the pod: SIGTERM, its grace period, SIGKILL."""
        self._ending.set()
        self._thread.join()

    # --- The life of the pod ---

    def _run(self) -> None:
        grace = self._spec.get("terminationGracePeriodSeconds", 30)
        mounts = self._mounts()
        while not self._ending.is_set():
            self.container = self._start(mounts)
            self.events.append("started")
            given_up = self._watch()
            status = self.container.process.poll()
            if status is None:
                status = self.container.stop(grace / self._speed if given_up else grace)
            self.is_ready = False
            self.events.append(f"stopped {status}")
            if status == 0 and self._spec.get("restartPolicy", "Always") != "Always":
                self.events.append("completed")
                return

    def _watch(self) -> bool:
        """Returns when the process has ended or has to; tells whether a probe gave it up."""
        probes = {name: self._definition.get(f"{name}Probe") for name in ("startup", "readiness", "liveness")}
        due = {name: Probe(spec, self._ask, self._speed) for name, spec in probes.items() if spec is not None}
        starting = due.pop("startup", None)
        while not self._ending.is_set() and self.container.process.poll() is None:
            if starting is not None:
                if starting.look():
                    starting = None
                elif starting.has_failed:
                    self.events.append("killed")
                    return True
            else:
                if "readiness" in due and (seen := due["readiness"].look()) is not None:
                    self._set_ready(seen, due["readiness"])
                if "liveness" in due and due["liveness"].look() is False and due["liveness"].has_failed:
                    self.events.append("killed")
                    return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _set_ready(self, seen: bool, probe: Probe) -> None:
        if seen and not self.is_ready:
            self.is_ready = True
            self.events.append("ready")
        elif self.is_ready and probe.has_failed:
            self.is_ready = False
            self.events.append("unready")

    def _ask(self, spec: dict[str, Any], timeout: float) -> bool:
        if "exec" in spec:
            return self.container.run(spec["exec"]["command"], timeout)
        with grpc.insecure_channel(f"127.0.0.1:{self._cluster.ports[spec['grpc']['port']]}") as channel:
            try:
                reply = channel.unary_unary(
                    "/grpc.health.v1.Health/Check",
                    request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                    response_deserializer=health_pb2.HealthCheckResponse.FromString,
                )(health_pb2.HealthCheckRequest(), timeout=timeout)
            except grpc.RpcError:
                return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    # --- What the container is made of ---

    def _start(self, mounts: list[Mount]) -> Container:
        environment = self._environment()
        words = [*self._definition.get("command", self._image.entrypoint), *self._definition.get("args", ())]
        for name, value in environment.items():
            words = [word.replace(f"$({name})", value) for word in words]
        return Container(
            self._image,
            [self._cluster.with_real_ports(word) for word in words],
            environment,
            mounts,
            new_root=self._folder / "root",
            log=self._folder / "log",
            hosts=self._hosts(),
        )

    def _environment(self) -> dict[str, str]:
        found = dict(self._cluster.environment)
        for source in self._definition.get("envFrom", ()):
            found.update(self._cluster.config_maps[source["configMapRef"]["name"]])
        for variable in self._definition.get("env", ()):
            if "value" in variable:
                found[variable["name"]] = variable["value"]
            else:
                found[variable["name"]] = str(self._fields[variable["valueFrom"]["fieldRef"]["fieldPath"]])
        return {name: self._cluster.with_real_ports(value) for name, value in found.items()}

    def _hosts(self) -> Path:
        path = self._folder / "hosts"
        lines = [f"{address} {name}" for name, address in self._cluster.hosts.items()]
        path.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        return path

    def _mounts(self) -> list[Mount]:
        volumes = {volume["name"]: volume for volume in self._spec.get("volumes", ())}
        mounts = [Mount(self._limits(), "/sys/fs/cgroup", read_only=True)]
        for mount in self._definition.get("volumeMounts", ()):
            source = self._volume(mount["name"], volumes.get(mount["name"]))
            mounts.append(Mount(source, mount["mountPath"], mount.get("readOnly", False)))
        return mounts

    def _volume(self, name: str, volume: dict[str, Any] | None) -> Path:
        """Returns the folder of a volume; what is not listed in the pod is a claim of its StatefulSet."""
        folder = self._folder / "volumes" / name if volume is not None else self._claims / name
        folder.mkdir(parents=True, exist_ok=True)
        group = self._spec["securityContext"]["fsGroup"]
        shutil.chown(folder, group=group)
        folder.chmod(0o2775)
        content: dict[str, bytes] = {}
        if volume is not None and "secret" in volume:
            content = self._cluster.secrets[volume["secret"]["secretName"]]
        elif volume is not None and "configMap" in volume:
            texts = self._cluster.config_maps[volume["configMap"]["name"]]
            content = {key: text.encode() for key, text in texts.items()}
        for key, value in content.items():
            file = folder / key
            file.write_bytes(value)
            shutil.chown(file, group=group)
            file.chmod(volume["secret"].get("defaultMode", 0o644) if volume and "secret" in volume else 0o644)
        return folder

    def _limits(self) -> Path:
        """Returns a folder with the files in which the kernel tells a container its limits."""
        limits = self._definition["resources"]["limits"]
        folder = self._folder / "cgroup"
        folder.mkdir()
        (folder / "memory.max").write_text(f"{parse_quantity(limits['memory'])}\n")
        (folder / "cpu.max").write_text(f"{int(limits['cpu']) * _CPU_PERIOD} {_CPU_PERIOD}\n")
        return folder


def parse_quantity(text: str) -> int:
    """Returns the number of bytes."""
    digits = text.rstrip("MGi")
    return int(digits) * _UNITS[text[len(digits) :]]
