"""The targets of `gradserve export`: JSON Lines, TensorBoard and Weights & Biases; and the curves that they draw.

Each target knows what it has already, so an export that begins again goes on where the last one ended.
"""

import fcntl
import json
import os
import re
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gradserve_protocol.extras import install_command
from gradserve_protocol.printing import visible
from gradserve_server.commands.export.rounds import Evaluation, Gradient, Mark, Round, Subject
from gradserve_server.commands.wording import as_plain

ROUND, EVALUATION = "round", "evaluation"
"""The first words of the tags of all rounds, and of those of all evaluations."""


def points_of_round(described: Round) -> dict[str, float]:
    """Returns the values of a round by their tags, such as "round/seconds", "metrics/loss" and "norm/WORKER"."""
    late, missing = len(described.late), described.missing
    found: dict[str, float | None] = {
        f"{ROUND}/gradients": described.num_counted,
        f"{ROUND}/required": described.num_required,
        f"{ROUND}/late": late,
        f"{ROUND}/missing": None if missing is None else len(missing),
        f"{ROUND}/seconds": described.seconds,
        f"{ROUND}/step_seconds": described.step_seconds,
        f"{ROUND}/apply_seconds": described.apply_seconds,
        f"{ROUND}/learning_rate": described.learning_rate,
        **{f"metrics/{visible(name)}": value for name, value in described.metrics.items()},
    }
    for each in described.gradients:
        if each.worker_id:
            found |= _of_worker(each)
    return {tag: float(value) for tag, value in found.items() if value is not None}


def points_of_evaluation(evaluation: Evaluation) -> dict[str, float]:
    """Returns the values of an evaluation by their tags, such as "evaluation/loss"."""
    return {f"{EVALUATION}/{visible(name)}": value for name, value in evaluation.metrics.items()}


def _of_worker(gradient: Gradient) -> Mapping[str, float | None]:
    return dict(_by_worker(gradient, visible(gradient.worker_id)))


def _by_worker(gradient: Gradient, worker: str) -> Iterator[tuple[str, float | None]]:
    yield f"arrival_seconds/{worker}", gradient.after
    yield f"waited_seconds/{worker}", gradient.waited
    yield f"weight/{worker}", gradient.weight
    yield f"staleness/{worker}", gradient.staleness
    yield f"norm/{worker}", gradient.norm
    yield f"cosine/{worker}", gradient.cosine
    for name, value in gradient.metrics.items():
        yield f"worker_{visible(name)}/{worker}", value


class Target(ABC):
    """A place that rounds and evaluations are written to, each once. What was written is there when a method returns.

    Attributes:
        last: The last round that it has; None for none.
    """

    last: Mark | None = None

    def write(self, rounds: Sequence[Round]) -> None:
        """Writes rounds that come after the last one.

        Raises:
            OSError: They cannot be written.
        """
        if rounds:
            self._write(rounds)
            self.last = Mark(rounds[-1].step, rounds[-1].ended)

    @abstractmethod
    def _write(self, rounds: Sequence[Round]) -> None: ...

    @abstractmethod
    def has_evaluation(self, step: int) -> bool:
        """Returns whether the evaluation of a version was written."""

    @abstractmethod
    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Writes evaluations that it does not have.

        Raises:
            OSError: They cannot be written.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the export. What was written stays."""


Opening = Callable[[Subject], Target]
"""Opens a target for what is exported."""


def to_jsonl(path: Path) -> Opening:
    """Returns what opens a file with a line for each round and each evaluation."""
    return lambda subject: _JsonLines(path, subject)


def to_tensorboard(folder: Path) -> Opening:
    """Returns what opens a run in a folder of TensorBoard.

    Raises:
        click.ClickException: tensorboardX is not installed.
    """
    try:
        import tensorboardX  # noqa: F401
    except ImportError as error:
        raise _missing("--tensorboard", "tensorboardX", "tensorboard") from error
    return lambda subject: _TensorBoard(folder, subject)


def to_wandb(project: str) -> Opening:
    """Returns what opens a run in a project of Weights & Biases.

    Raises:
        click.ClickException: wandb is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise _missing("--wandb", "wandb", "wandb") from error

    def open_run(subject: Subject) -> Target:
        try:
            return _WandB(project, subject)
        except wandb.Error as error:
            raise click.ClickException(f"--wandb {project}: {error}") from None

    return open_run


def _missing(option: str, library: str, extra: str) -> click.ClickException:
    return click.ClickException(f"{option} needs {library}; install it with: {install_command(extra)}")


def _locked(descriptor: int, path: Path) -> None:
    """Lets one export at a time write to a file or a folder.

    Raises:
        click.ClickException: Another one does.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise click.ClickException(f"{path}: another export writes there") from None


class _JsonLines(Target):
    def __init__(self, path: Path, subject: Subject) -> None:
        self._path = path
        self._evaluated = set[int]()
        self._head = {
            "kind": subject.kind,
            "container": subject.container,
            "name": subject.name,
            "incarnation": subject.incarnation,
        }
        self._file = path.open("a+b")
        try:
            _locked(self._file.fileno(), path)
            self._read(subject)
        except BaseException:
            self._file.close()
            raise

    def _read(self, subject: Subject) -> None:
        self._file.seek(0)
        length = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):  # cut when an export was killed, or its disk was full
                self._file.truncate(length)
                break
            length += len(line)
            self._take(line, number, subject)

    def _take(self, line: bytes, number: int, subject: Subject) -> None:
        try:
            found = json.loads(line)
            head = {name: found[name] for name in self._head}
            is_round, step, ended = found["record"] == ROUND, int(found["step"]), float(found.get("ended") or 0.0)
        except (ValueError, KeyError, TypeError):
            raise click.ClickException(f"{self._path}: line {number} is not of an export") from None
        if head != self._head:
            raise click.ClickException(
                f"{self._path} is an export of {head['kind']} {head['container']}/{head['name']}, incarnation "
                f"{head['incarnation']}; expected a new file, or one of {subject.title}, incarnation "
                f"{subject.incarnation}"
            )
        if is_round:
            self.last = Mark(step, ended)
        else:
            self._evaluated.add(step)

    def _write(self, rounds: Sequence[Round]) -> None:
        self._append(ROUND, rounds)

    def has_evaluation(self, step: int) -> bool:
        return step in self._evaluated

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        self._append(EVALUATION, evaluations)
        self._evaluated.update(each.step for each in evaluations)

    def _append(self, record: str, described: Sequence[Round] | Sequence[Evaluation]) -> None:
        lines = [{"record": record, **self._head, **as_plain(each)} for each in described]
        self._file.write("".join(f"{json.dumps(each, allow_nan=False)}\n" for each in lines).encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _TensorBoard(Target):
    """A run of TensorBoard: a folder, in which each export has a file with one event for each round."""

    _SUFFIX = ".gradserve"

    def __init__(self, folder: Path, subject: Subject) -> None:
        self._folder = folder / _run_name(subject)
        self._evaluated = set[int]()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _locked(self._lock, self._folder)
            self._earlier = sorted(self._folder.glob(f"events.out.tfevents.*{self._SUFFIX}-*"))
            self._read()
        except BaseException:
            os.close(self._lock)
            raise
        self._writer: Any = None

    def _read(self) -> None:
        for path in self._earlier:
            for event in _events(path):
                tags = {value.tag.partition("/")[0] for value in event.summary.value}
                if EVALUATION in tags:
                    self._evaluated.add(event.step)
                elif ROUND in tags and (self.last is None or event.wall_time >= self.last.ended):
                    self.last = Mark(event.step, event.wall_time)

    def _write(self, rounds: Sequence[Round]) -> None:
        for each in rounds:
            self._add(each.step, each.ended, points_of_round(each))
        self._writer.flush()

    def has_evaluation(self, step: int) -> bool:
        return step in self._evaluated

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        for each in evaluations:
            self._add(each.step, time.time(), points_of_evaluation(each))
            self._evaluated.add(each.step)
        if evaluations:
            self._writer.flush()

    def _add(self, step: int, wall_time: float, points: dict[str, float]) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        if self._writer is None:  # its own number in the name: it would overwrite a file of the same second
            self._writer = EventsWriter(str(self._folder / "events"), f"{self._SUFFIX}-{len(self._earlier)}")
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]
        self._writer.write_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        os.close(self._lock)


def _run_name(subject: Subject) -> str:
    """Returns a name for a folder: that of the subject, as far as folders can have it, and digits of its run id."""
    plain = re.sub(r"[^\w.-]+", "_", subject.name).lstrip(".")[:80]
    return f"{plain}-{subject.run_id[:8]}"


def _events(path: Path) -> Iterator[Any]:
    """Yields the events of a file, up to the first one that is not whole.

    A file is a row of records: length (8 bytes), checksum of the length (4), event, checksum of the event (4).
    """
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event

    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack_from("<Q", head)
            record = file.read(length + 4)
            if len(record) < length + 4:
                return
            try:
                yield Event.FromString(record[:-4])
            except DecodeError:
                return


class _WandB(Target):
    def __init__(self, project: str, subject: Subject) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=project,
            id=subject.run_id,
            name=subject.name,
            resume="allow",
            config={
                "kind": subject.kind,
                "container": subject.container,
                "name": subject.name,
                "incarnation": subject.incarnation,
            },
        )
        # W&B's own step only goes up, and evaluations of a version come after later rounds.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        summary = self._run.summary
        step, ended = summary.get(f"{ROUND}/step"), summary.get(f"{ROUND}/ended")
        if step is not None and ended is not None:
            self.last = Mark(int(step), float(ended))
        self._evaluated = set[int]()
        self._evaluated_before = int(summary.get(f"{EVALUATION}/step", -1))
        """The latest step of which an earlier export wrote the evaluation."""

    def _write(self, rounds: Sequence[Round]) -> None:
        for each in rounds:
            mark = {f"{ROUND}/step": each.step, f"{ROUND}/ended": each.ended}
            self._run.log({"step": each.step, **mark, **points_of_round(each)})

    def has_evaluation(self, step: int) -> bool:
        return step in self._evaluated or step <= self._evaluated_before

    def write_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        for each in evaluations:
            self._evaluated.add(each.step)
            mark = {f"{EVALUATION}/step": max(self._evaluated_before, *self._evaluated)}
            self._run.log({"step": each.step, **mark, **points_of_evaluation(each)})

    def close(self) -> None:
        self._run.finish()
