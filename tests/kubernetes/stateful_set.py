"""A small controller of StatefulSets: runs all pods of one, each with its number and volumes, and restarts them."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.kubernetes.kubelet import Cluster, Pod
from tests.kubernetes.manifests import Manifest


class StatefulSet:
    """The pods of a StatefulSet, from the start of the block to its end.

    Attributes:
        pods: The pods that run now, by their numbers.
        deleted: The pods that were deleted by restarts, in order.
    """

    def __init__(self, manifest: Manifest, clusters: Sequence[Cluster], *, claims: Path) -> None:
        """Takes the manifest, what each pod is made of, as pods share the ports of this machine, and where volumes are.

        Raises:
            ValueError: Its pods are to start one after the other, which is not possible here.
        """
        if manifest["spec"]["podManagementPolicy"] != "Parallel":
            raise ValueError("the pods have to start at the same time")
        self._manifest = manifest
        self._clusters = clusters
        self._claims = claims
        self.pods: list[Pod] = []
        self.deleted: list[Pod] = []

    def __enter__(self) -> Self:
        with ExitStack() as on_failure:
            on_failure.push(self.__exit__)
            for index in range(self._manifest["spec"]["replicas"]):
                self.pods.append(self._started(index))
            for pod in self.pods:
                pod.wait_for("ready")
            on_failure.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        for pod in self.pods:
            pod.__exit__()

    def restart(self, index: int) -> None:
        """Deletes a pod and creates it again, with the same number and volumes; waits until it is ready."""
        self.pods[index].__exit__()
        self.deleted.append(self.pods[index])
        self.pods[index] = self._started(index)
        self.pods[index].wait_for("ready")

    def _started(self, index: int) -> Pod:
        name = f"{self._manifest['metadata']['name']}-{index}"
        pod = Pod(
            f"{name}-run-{len(self.deleted)}",
            self._manifest["spec"]["template"],
            self._clusters[index],
            claims=self._claims / name,
            pod_index=index,
        )
        return pod.__enter__()
