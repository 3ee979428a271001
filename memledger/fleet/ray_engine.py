"""The engine of many machines: Ray places the tasks, retries what a lost worker or node had, and watches their memory.

Nothing of that is done again here: files go out in batches (a task of its own for each would cost more than a small log), a bounded number
of batches at a time. A batch that Ray gives up is handed out again file by file, so that only the file at fault has a row that says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final

import msgspec

from memledger import __version__
from memledger.ahead import usable_cores
from memledger.extras import install_command
from memledger.fleet import one
from memledger.fleet.engine import EngineError, Reader
from memledger.fleet.one import Outcome, Settings, Work

BATCH_BYTES: Final = 256 * 2**20
BATCH_FILES: Final = 64
"""A batch holds no more than this: a second or more of reading, and no more lost with a node."""
BATCHES_PER_CORE: Final = 4
"""Batches that are handed out at a time: enough that no core waits, few enough that the driver's memory stays small."""
POLL_SECONDS: Final = 0.2
OBJECT_STORE_BYTES: Final = 128 * 2**20
"""For a cluster of our own; rows are small."""


def batches(work: Sequence[Work], cores: int) -> list[list[Work]]:
    """The work in batches of like size; on a small fleet smaller ones, so that every core has some."""
    most_files = max(1, min(BATCH_FILES, len(work) // (cores * BATCHES_PER_CORE)))
    found: list[list[Work]] = []
    size = 0
    for item in work:
        if not found or len(found[-1]) >= most_files or size + (item.size or 0) > BATCH_BYTES:
            found.append([])
            size = 0
        found[-1].append(item)
        size += item.size or 0
    return found


class RayEngine:
    """Tasks on a Ray cluster: that of `address` (or of the environment's RAY_ADDRESS), else one of this machine for as long as it is needed."""

    def __init__(
        self,
        settings: Settings,
        *,
        address: str | None = None,
        workers: int | None = None,
        retries: int = 2,
        reader: Reader = one.read,
    ) -> None:
        self._settings = settings
        self._address = address or os.environ.get("RAY_ADDRESS") or None
        self._workers = workers
        self._retries = retries
        self._reader = reader
        self._ray: Any = None

    def __enter__(self) -> RayEngine:
        # Ray reports its use to its makers unless told not to; a cluster of somebody else's has its own setting.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError as error:
            raise EngineError(f"--engine ray takes Ray: {install_command('ray')}") from error
        try:
            ray.init(**self._options())
        except Exception as error:  # ConnectionError, RuntimeError, ValueError: a cluster that does not answer, or is another version's
            raise EngineError(f"Ray: {' '.join(str(error).split()) or type(error).__name__}") from error
        self._ray = ray
        return self

    def _options(self) -> dict[str, Any]:
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if self._address is not None:
            return {**common, "address": self._address}
        return {
            **common,
            "address": "local",
            "num_cpus": self._workers or usable_cores(),
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            # Of a task that ran out of memory, too: the default is for ever.
            "_system_config": {"task_oom_retries": self._retries},
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ray is not None:
            self._ray.shutdown()
            self._ray = None

    @property
    def cores(self) -> int:
        """Tasks that can run at once."""
        return self._workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def results(self, work: Sequence[Work], ended: Callable[[], bool]) -> Iterator[tuple[Work, Outcome]]:
        """See `memledger.fleet.engine.Engine`."""
        waiting = batches(work, self.cores)[::-1]
        running: dict[Any, list[Work]] = {}
        most = self.cores * (1 if self._workers and self._address else BATCHES_PER_CORE)
        while (waiting or running) and not ended():
            while waiting and len(running) < most:
                batch = waiting.pop()
                running[self._submit(batch)] = batch
            done, _ = self._ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
            for reference in done:
                batch = running.pop(reference)
                try:
                    outcomes = self._outcomes(reference, batch)
                except self._ray.exceptions.RayError as error:
                    if len(batch) == 1:
                        yield batch[0], self._given_up(batch[0], error)
                    else:
                        waiting += [[item] for item in batch]
                else:
                    yield from zip(batch, outcomes, strict=True)
        for reference in running:
            self._ray.cancel(reference, force=True)

    def _submit(self, batch: list[Work]) -> Any:
        task = self._ray.remote(_task).options(
            num_cpus=1,
            memory=self._settings.memory_limit_bytes,
            max_retries=self._retries,
            scheduling_strategy="SPREAD",
        )
        return task.remote(self._reader, msgspec.json.encode(batch), msgspec.json.encode(self._settings))

    def _outcomes(self, reference: Any, batch: list[Work]) -> list[Outcome]:
        version, data = self._ray.get(reference)
        if version != __version__:
            raise EngineError(
                f"the cluster's nodes have memledger {version}, this machine has {__version__}: install the same version on all."
            )
        found: list[Outcome] = msgspec.json.decode(data, type=list[Outcome])
        assert len(found) == len(batch)
        return found

    def _given_up(self, work: Work, error: Exception) -> Outcome:
        """The row of a file whose task Ray gave up, alone in its batch."""
        name = type(error).__name__
        if isinstance(error, self._ray.exceptions.OutOfMemoryError):
            return one.failure(
                work, "memory_limit", f"Ray ended the task that read it: its node ran out of memory ({name})."
            )
        if isinstance(error, self._ray.exceptions.RayTaskError):
            # The task itself could not run: memledger missing on a node, another Python.
            raise EngineError(f"Ray: {' '.join(str(error.cause or error).split())[:500]}") from error
        limit = f"at most {self._settings.time_limit_s:g} s are allowed (--time-limit)"
        return one.failure(
            work, "crashed", f"the process that read it ended {self._retries + 1} times ({name}; {limit})."
        )


def _task(reader: Reader, batch: bytes, settings: bytes) -> tuple[str, bytes]:
    """A batch on a worker of the cluster: the version there, and the outcomes."""
    allowed = msgspec.json.decode(settings, type=Settings)
    one.prepare(allowed)
    outcomes = [reader(work, allowed) for work in msgspec.json.decode(batch, type=list[Work])]
    return __version__, msgspec.json.encode(outcomes)
