"""The task in a Dask worker that runs the ranks of a job on it: start, watch, report, end."""

from __future__ import annotations

import logging
import os
import pickle
import selectors
from dataclasses import asdict, dataclass
from typing import Any

from ddp_core._activity import Activity
from ddp_core._bridge import Bridge
from ddp_core._environment import dask_environment, rank_environment
from ddp_core._failures import error_from, exited, raised
from ddp_core._logs import RankLogs
from ddp_core._output import write_stderr
from ddp_core._process import ChildProcess, nursery
from ddp_core._ranks import Rank, device_indices
from ddp_core.errors import DDPCoreError, JobCancelledError, ResultError, WorkerLostError
from ddp_core.options import LaunchOptions

logger = logging.getLogger("ddp_core.agent")

TICK_S = 0.25


@dataclass(frozen=True)
class AgentSpec:
    """What one agent is to do. ``decode``: whether the task's value is the plain result."""

    job_id: str
    attempt: int
    agent: int
    ranks: tuple[Rank, ...]
    options: LaunchOptions
    decode: bool = False

    @property
    def id(self) -> str:
        """The attempt, as the coordinator calls it."""
        return f"{self.job_id}/{self.attempt}"


@dataclass(frozen=True)
class Packed:
    """Pickled results on their way to the client, by rank; the worker never opens them."""

    results: dict[int, bytes]


def run_agent(spec: AgentSpec, payload: bytes) -> Any:
    """Run the ranks of one worker to the end of the job; the body of the Dask task.

    Returns:
        The result of the only rank when ``spec.decode``, else ``Packed`` results.

    Raises:
        DDPCoreError: The cause of the job's failure, the same on every worker.
    """
    bridge = Bridge(spec.id, spec.agent)
    try:
        return Agent(spec, payload, bridge).run()
    finally:
        bridge.close()


class Agent:
    """Supervises the rank processes of one worker, in the task's thread."""

    def __init__(self, spec: AgentSpec, payload: bytes, bridge: Bridge) -> None:
        self.spec = spec
        self.payload = payload
        self.bridge = bridge
        self.processes: dict[int, ChildProcess] = {}
        self.store: ChildProcess | None = None
        self.logs: RankLogs | None = None
        self.view: dict[str, Any] = {}
        self.selector = selectors.DefaultSelector()
        self.failed: set[int] = set()
        self.went = False
        self.all_joined = False
        self.asked_stacks = False
        self.activity = Activity(spec.options.stall_timeout_s)
        self.results: dict[int, bytes] = {}

    def run(self) -> Any:
        """Join the gang, follow it to its end, and leave nothing behind."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.view = self.bridge.call("join", worker=self.bridge.worker.address, visible=visible)
        if "refused" in self.view:
            raise self._refusal()
        try:
            self.selector.register(self.bridge.wake_fd, selectors.EVENT_READ)
            self.bridge.follow(-1)
            while not self._is_over():
                self.selector.select(TICK_S)
                self._obey()
                self._watch()
        except DDPCoreError:
            raise
        except BaseException as exc:
            self._fail({"kind": "setup", "text": f"the agent on {self._here()} failed: {exc!r}"})
            raise
        finally:
            self._close()
        return self._value()

    def _obey(self) -> None:
        """Follow what the coordinator says."""
        for view in self.bridge.news():
            self.view = view
        state = self.view["state"]
        if self.bridge.is_closing() and not self.view.get("cause"):
            text = f"worker {self.bridge.worker.address} is closing"
            self._fail({"kind": "worker-lost", "text": text})
            self._stop_ranks()
        elif self.view.get("cause") and state in ("stopping", "ended"):
            self._stop_ranks()
        elif state == "starting" and not self.processes:
            self._start()
        if state in ("running", "stopping") and not self.all_joined:
            self.all_joined = True
            for process in self.processes.values():
                process.order("joined")
        if self.view.get("want_stacks") and not self.asked_stacks:
            self.asked_stacks = True
            for process in self.processes.values():
                process.order("stacks")
        if self.view.get("go") and not self.went:
            self.went = True
            host, port = self.view["address"]
            for process in self.processes.values():
                process.order("go", host=host, port=port, backend=self._backend())

    def _start(self) -> None:
        """Start the ranks, and beside them the store when rank 0 is here."""
        options = self.spec.options
        indices = device_indices(self._visible())
        dask_variables = dask_environment(
            self.bridge.worker.scheduler.address, getattr(self.bridge.worker, "security", None)
        )
        for rank in self.spec.ranks:
            env = rank_environment(
                os.environ,
                rank,
                job_id=self.spec.job_id,
                attempt=self.spec.attempt,
                max_restarts=options.max_restarts,
                extra={**dask_variables, **options.env},
            )
            with nursery(env) as source:
                if rank.rank == 0:
                    where = {"host": rank.host, "port": options.port}
                    self.store = ChildProcess(source, "_rendezvous", env, where, warm=options.warm)
                    self._listen_to(self.store)
                self.processes[rank.rank] = process = ChildProcess(
                    source,
                    "_child",
                    env,
                    self._child_spec(rank, indices[rank.rank]),
                    payload=self.payload,
                    warm=options.warm,
                )
            self._listen_to(process)
        self.payload = b""
        self.logs = RankLogs({r: p.out_fd for r, p in self.processes.items()}, self._send_logs)
        self._post({r: {"state": "starting"} for r in self.processes})

    def _listen_to(self, process: ChildProcess) -> None:
        self.selector.register(process.report_fd, selectors.EVENT_READ)
        self.selector.register(process.exit_fd, selectors.EVENT_READ)

    def _send_logs(self, lines: list[tuple[int, str]]) -> None:
        match self.spec.options.logs:
            case "worker":
                texts = [(rank, line.rstrip("\r")) for rank, line in lines]
                write_stderr("".join(f"[rank {rank}] {text}\n" for rank, text in texts))
            case "stderr" | "logger":
                self.bridge.tell("log", lines=lines)

    def _child_spec(self, rank: Rank, device_index: int) -> dict[str, Any]:
        options = self.spec.options
        described = asdict(rank)
        for field in ("worker", "agent", "n_nodes"):
            del described[field]
        return {
            "rank": {**described, "job_id": self.spec.job_id, "attempt": self.spec.attempt},
            "device_index": device_index,
            "init_process_group": options.init_process_group,
            "pass_local_rank": options.pass_local_rank,
            "pg_timeout_s": options.pg_timeout_s,
            "rendezvous_timeout_s": options.rendezvous_timeout_s,
            "grace_s": options.grace_s,
        }

    def _backend(self) -> str:
        return self.spec.options.backend or str(self.view.get("backend") or "")

    def _visible(self) -> list[tuple[str, str | None]]:
        """Host and visible CUDA devices of every rank of the job, in rank order."""
        return [(host, seen) for _, host, seen in sorted(self.view["visible"], key=lambda v: v[0])]

    def _watch(self) -> None:
        """Listen to the ranks, and collect those that have ended."""
        self._watch_store()
        if idle := self.activity.look(self.processes, self.logs):
            self._post({rank: {"idle_s": seconds} for rank, seconds in idle.items()})
        for rank, process in self.processes.items():
            if process.exit_code is not None:
                continue
            over = process.reap()
            for event in process.events():
                self._hear(rank, process, event)
            if over:
                self.selector.unregister(process.exit_fd)
                self.selector.unregister(process.report_fd)
                self._bury(rank, process)

    def _watch_store(self) -> None:
        store = self.store
        if store is None or store.exit_code is not None:
            return
        over = store.reap()
        for event in store.events():
            if event["event"] == "listening":
                self.bridge.tell("post", address=[event["host"], event["port"]])
            else:
                store.raised = event
                self._fail({"kind": "rendezvous", "text": event["text"]})
        if over:
            self.selector.unregister(store.exit_fd)
            self.selector.unregister(store.report_fd)
            if store.raised is None:
                failure = exited("the store of the rendezvous", store.exit_code or 0)
                self._fail({**failure, "kind": "aborted"})

    def _hear(self, rank: int, process: ChildProcess, event: dict[str, Any]) -> None:
        match event["event"]:
            case "ready":
                self._post({rank: {"state": "ready", "device": event["device"]}})
            case "running":
                self._post({rank: {"state": "running"}})
            case "stacks":
                self._post({rank: {"stacks": event["text"]}})
            case "returned":
                process.returned = True
                self.results[rank] = process.read_outbox()
                process.leave_within(self.spec.options.exit_timeout_s)
                self._post({rank: {"state": "returned"}})
            case "exiting":
                process.last_words = event["text"]
            case "raised":
                process.raised = event
                failure = raised(self._place(rank), event, process.read_outbox())
                process.leave_within(self.spec.options.grace_s)
                self._fail(failure, rank)

    def _bury(self, rank: int, process: ChildProcess) -> None:
        code = process.exit_code or 0
        if process.returned:
            if code:
                logger.warning("%s ended with %s after it had returned", self._place(rank), code)
        elif process.raised is None and not self._is_stopping():
            failure = exited(
                self._place(rank), code, process.last_words, with_nccl="nccl" in self._backend()
            )
            self._fail(failure, rank)
        self._post({rank: {"state": "left"}})

    def _fail(self, failure: dict[str, Any], rank: int | None = None) -> None:
        first = self.spec.ranks[0]
        known: dict[str, Any] = {"rank": first.rank if rank is None else rank, "host": first.host}
        if rank is not None and self.logs is not None:
            known["log"] = self.logs.tail(rank)
        self.bridge.tell("fail", failure={**known, "worker": self.bridge.worker.address, **failure})
        if rank is not None:
            self._post({rank: {"state": "failed"}})

    def _post(self, news: dict[int, dict[str, Any]]) -> None:
        self.bridge.tell("post", ranks=[[r, n] for r, n in news.items()])

    def _stop_ranks(self) -> None:
        for process in self.processes.values():
            if process.exit_code is None:
                process.stop(self.spec.options.grace_s)

    def _is_stopping(self) -> bool:
        return bool(self.view.get("cause")) or self.bridge.is_closing()

    def _is_over(self) -> bool:
        ended = self.view["state"] in ("stopping", "ended") or self.bridge.is_closing()
        return ended and all(p.exit_code is not None for p in self.processes.values())

    def _close(self) -> None:
        if self.logs is not None:
            self.logs.close()
        for process in (*self.processes.values(), *([self.store] if self.store else [])):
            process.close()
        self.selector.close()
        self.bridge.tell("leave")

    def _value(self) -> Any:
        if set(self.results) != {r.rank for r in self.spec.ranks}:
            cause = self.view.get("cause") or {"kind": "worker-lost", "text": "the worker closed"}
            raise error_from(
                cause,
                job_id=self.spec.job_id,
                attempt=self.spec.attempt,
                others=tuple(self.view.get("others", ())),
            )
        results, self.results = self.results, {}  # an agent lives until cycles are collected
        if not self.spec.decode:
            return Packed(results)
        rank, data = next(iter(results.items()))
        return unpack(data, rank)

    def _refusal(self) -> DDPCoreError:
        cause = self.view.get("cause")
        if cause:
            return error_from(cause, job_id=self.spec.job_id, attempt=self.spec.attempt)
        kind = WorkerLostError if "second time" in self.view["refused"] else JobCancelledError
        return kind(f"job {self.spec.job_id}: not started, {self.view['refused']}")

    def _place(self, rank: int) -> str:
        return f"rank {rank} on {self._here()}"

    def _here(self) -> str:
        return f"{self.spec.ranks[0].host} (worker {self.bridge.worker.address})"


def unpack(data: bytes, rank: int) -> Any:
    """Unpickle what a rank returned.

    Raises:
        ResultError: When it cannot be unpickled here, with the reason as ``__cause__``.
    """
    try:
        return pickle.loads(data)
    except Exception as exc:
        raise ResultError(
            f"rank {rank} returned a value that cannot be unpickled here: {exc!r}", rank=rank
        ) from exc
