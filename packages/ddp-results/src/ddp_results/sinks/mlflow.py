"""Metrics and results in a run of MLflow."""
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import contextlib
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp_results._metrics import as_float
from ddp_results._record import Point, Source
from ddp_results.errors import SinkError, SinkUnavailableError
from ddp_results.sinks.base import Sink, Writer

# What the server takes in one request, so that a batch and its number are stored together.
_MAX_VALUES = 1000
_MAX_TAGS = 100
_MAX_NAME, _MAX_TEXT = 250, 8000
_FORBIDDEN = re.compile(r"[^\w./: -]")
_PERMANENT = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST", "NOT_IMPLEMENTED"}
_SEQ_TAG = "ddp-results.seq."


class MLflowSink(Sink):
    """Metrics become metrics of one MLflow run, texts its tags, named results its artifacts.

    A metric of rank 2 is called `<name>/rank-2`, outside of a process group `<name>`; what MLflow
    does not allow in a name becomes `_`. A point without a step is at the step of its number. The
    number of the last point of each process is kept in a tag of the run, so that a point which
    comes again is logged once, also when another client goes on with the `run_id`. A result is
    replaced as atomically as the artifact store does it. A run that the sink has created is
    FINISHED when it is closed; one that was given is left as it is.

    Args:
        experiment: its name, or `mlflow://` and its name; it is created if it does not exist.
        run_id: the run to go on with; None for a new run with the first use.
        run_name: the name of a new run.
        tracking_uri: None for `MLFLOW_TRACKING_URI`.

    Raises:
        SinkUnavailableError: if mlflow is not installed.
    """

    flush_every_s = 2.0

    def __init__(
        self,
        experiment: str = "Default",
        *,
        run_id: str | None = None,
        run_name: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        try:
            import mlflow  # noqa: F401
        except ImportError as error:
            raise SinkUnavailableError(
                "MLflowSink needs mlflow: pip install 'ddp-results[mlflow]'"
            ) from error
        self.experiment = experiment.removeprefix("mlflow://") or "Default"
        self.run_id = run_id
        self.run_name = run_name
        self.tracking_uri = tracking_uri
        self._client: Any = None
        self._is_own = run_id is None
        self._last: dict[str, int] = defaultdict(int)

    def open(self) -> None:
        """Find the run, or create one.

        Raises:
            SinkUnavailableError: if the server does not answer, or does not know the run.
        """
        if self._client is not None:
            return
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            client = MlflowClient(self.tracking_uri)
            if self.run_id is None:
                found = client.get_experiment_by_name(self.experiment)
                number = found.experiment_id if found else client.create_experiment(self.experiment)
                self.run_id = client.create_run(number, run_name=self.run_name).info.run_id
            elif self._is_own:
                client.update_run(self.run_id, status="RUNNING")
            tags = client.get_run(self.run_id).data.tags
        except (MlflowException, OSError) as error:
            raise SinkUnavailableError(
                f"cannot log to MLflow, experiment {self.experiment!r}, run {self.run_id}: {error};"
                " check tracking_uri or MLFLOW_TRACKING_URI"
            ) from error
        for name, value in tags.items():
            if name.startswith(_SEQ_TAG):
                self._last[name.removeprefix(_SEQ_TAG)] = int(value)
        self._client = client

    def write(self, path: str, data: bytes) -> None:
        """Store a named result as an artifact."""
        writer = self.writer(path, len(data))
        try:
            writer.append(data)
            writer.commit()
        finally:
            writer.abort()

    def writer(self, path: str, size_bytes: int) -> Writer:
        """Return a writer into a temporary file, which becomes the artifact."""
        del size_bytes
        self.open()
        folder, _, name = path.rpartition("/")

        def log(file: Path) -> None:
            with _errors(path):
                self._client.log_artifact(self.run_id, str(file), folder or None)

        return _ArtifactWriter(name, log)

    def append(self, source: Source, points: Sequence[Point]) -> None:
        """Log the points that are new, up to 1000 metrics with each call."""
        self.open()
        new = [point for point in points if point.seq > self._last[source.uid]]
        while new:
            n_values, n_texts, batch = 1, 1, 0
            for point in new:
                n_values += len(point.values)
                n_texts += sum(isinstance(value, str) for value in point.values.values())
                if batch and (n_values > _MAX_VALUES or n_texts > _MAX_TAGS):
                    break
                batch += 1
            self._log(source, new[:batch])
            self._last[source.uid] = new[batch - 1].seq
            del new[:batch]

    def delete(self, path: str) -> None:
        """Remove an artifact.

        Raises:
            SinkError: if the artifact store has no way to do it.
        """
        self.open()
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        with _errors(path):
            store: Any = get_artifact_repository(
                self._client.get_run(self.run_id).info.artifact_uri
            )
            with contextlib.suppress(FileNotFoundError):
                store.delete_artifacts(path)

    def close(self) -> None:
        """End the run, if it is the sink's own."""
        if self._client is not None and self._is_own:
            with _errors(f"the end of run {self.run_id}"):
                self._client.set_terminated(self.run_id)
        self._client = None

    def _log(self, source: Source, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric, RunTag

        end = f"/rank-{source.rank}" if source.rank >= 0 else ""
        metrics, tags = [], {}
        for point in points:
            step = point.seq if point.step is None else point.step
            at_ms = int(point.time_s * 1000)
            for name, value in point.values.items():
                key = _FORBIDDEN.sub("_", name)[: _MAX_NAME - len(end)] + end
                if isinstance(value, str):
                    tags[key] = value[:_MAX_TEXT]
                elif value is not None:
                    metrics.append(Metric(key, as_float(value), at_ms, step))
        tags[_SEQ_TAG + source.uid] = str(points[-1].seq)
        with _errors(f"metrics of {source.label}"):
            self._client.log_batch(
                self.run_id, metrics=metrics, tags=[RunTag(*tag) for tag in tags.items()]
            )

    def __repr__(self) -> str:
        return f"MLflowSink({self.experiment!r}, run_id={self.run_id!r})"


class _ArtifactWriter(Writer):
    """A temporary file of the right name."""

    def __init__(self, name: str, log: Callable[[Path], None]) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="ddp-results-")
        self._path = Path(self._scratch.name) / name
        self._file = self._path.open("wb", buffering=0)
        self._written = 0
        self._log = log

    def append(self, data: bytes | memoryview) -> None:
        """Add a piece; after a failure the same piece may be given again."""
        self._file.seek(self._written)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) or 0 :]
        self._written += len(data)

    def commit(self) -> None:
        """Hand the file to MLflow."""
        self._log(self._path)

    def abort(self) -> None:
        """Remove the file."""
        self._file.close()
        self._scratch.cleanup()


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except NotImplementedError as error:
        raise SinkError(f"MLflow cannot do it: {what!r}: {error}") from error
    except MlflowException as error:
        raise SinkError(
            f"logging {what!r} to MLflow: {error}",
            transient=getattr(error, "error_code", "") not in _PERMANENT,
        ) from error
