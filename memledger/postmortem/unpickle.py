"""The process that loads a snapshot; `memledger.postmortem.torch_snapshot` starts it with the file as standard input.

Exit 0: the sums as JSON on stdout. Exit 2: one sentence on stdout. Anything else: a limit was met.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final, NoReturn

import msgspec

from memledger.postmortem.torch_snapshot import DeviceMemory, FrameShare, LastOom, Pool, TorchSnapshot
from memledger.sanitize import clean

SMALL_BYTES: Final = 2**20
"""Requests up to this are placed in segments of type `small` (kSmallSize of c10/cuda/CUDACachingAllocator.h)."""
PENDING: Final = ("active_pending_free", "active_awaiting_free")
MOST_DEVICES: Final = 256
MOST_SHARES: Final = 20
MOST_POOLS: Final = 50
MOST_FRAMES: Final = 100_000
"""Different frames that are told apart; the rest counts as without frames."""
MOST_BLOCKS: Final = 20_000_000
"""Blocks and trace entries that are looked at: one list may stand in a small pickle a million times."""
_SAFE_SETTINGS: Final = 20


class NotASnapshotError(ValueError):
    """The pickle holds something else, or needs what a snapshot does not."""


class _Unpickler(pickle.Unpickler):
    """No globals, no persistent ids: a snapshot is plain data."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse."""
        raise NotASnapshotError(
            f"refused: loading it would run code of {clean(module, 60)}.{clean(name, 60)}; a memory snapshot needs none"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        """Refuse."""
        raise NotASnapshotError("refused: it refers to objects outside itself; a memory snapshot does not")


def main() -> int:
    """Load standard input under the limits given as arguments."""
    _limit(int(sys.argv[1]), int(sys.argv[2]))
    try:
        answer = msgspec.json.encode(summary(_Unpickler(sys.stdin.buffer).load()))
    except NotASnapshotError as error:
        sys.stdout.write(str(error))
        return 2
    except (MemoryError, RecursionError, OverflowError):
        return 3
    except Exception as error:
        # A damaged pickle can make the loader raise anything; what it was is no secret and no trace helps.
        sys.stdout.write(f"a pickle that is cut off or damaged ({type(error).__name__}: {clean(str(error), 120)})")
        return 2
    sys.stdout.buffer.write(answer)
    sys.stdout.flush()
    # What was loaded needs no taking apart: nested a million deep, that would take longer than the rest.
    os._exit(0)


def _limit(memory: int, seconds: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def summary(data: Any) -> TorchSnapshot:
    """The sums of the loaded data; a list of segments alone is the layout of torch 2.0.

    Raises:
        NotASnapshotError: it is of another shape.
    """
    segments = data.get("segments") if isinstance(data, dict) else data
    if not isinstance(segments, list) or not all(isinstance(s, dict) and "total_size" in s for s in segments):
        raise NotASnapshotError(
            "a pickle of something else: a memory snapshot has a list `segments` with `total_size` each"
        )
    traces = data.get("device_traces") if isinstance(data, dict) else None
    budget = _Budget()
    by_device: dict[int, list[dict[Any, Any]]] = {}
    for segment in segments:
        budget.take()
        by_device.setdefault(_size(segment.get("device", 0)), []).append(segment)
    if len(by_device) > MOST_DEVICES:
        raise NotASnapshotError(f"a pickle of something else: it has more than {MOST_DEVICES} devices")
    ooms = _last_ooms(traces, budget)
    devices = sorted({*by_device, *ooms})
    settings = data.get("allocator_settings") if isinstance(data, dict) else None
    return TorchSnapshot(
        "", tuple(_device(d, by_device.get(d, []), ooms.get(d), budget) for d in devices), _settings(settings)
    )


class _Budget:
    """How much is still looked at."""

    def __init__(self) -> None:
        self.left = MOST_BLOCKS

    def take(self) -> None:
        """One thing more."""
        self.left -= 1
        if self.left < 0:
            raise NotASnapshotError(f"it has more than {MOST_BLOCKS:,} blocks, which no snapshot of a server has")


def _device(device: int, segments: list[dict[Any, Any]], oom: _Oom | None, budget: _Budget) -> DeviceMemory:
    reserved = allocated = pending = inactive = largest = private = private_unused = 0
    pools: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    shares: dict[str, list[int]] = {}
    unknown = usable = largest_usable = 0
    for segment in segments:
        is_private = _is_private(segment)
        size = _size(segment.get("total_size"))
        serves = oom is not None and oom.may_have(segment)
        reserved += size
        private += size if is_private else 0
        pool = pools.setdefault((_int(segment.get("stream", 0)), _pool_id(segment)), [0, 0, 0])
        pool[0] += 1
        pool[1] += size
        for block in _dicts(segment.get("blocks")):
            budget.take()
            bytes_ = _size(block.get("size"))
            state = block.get("state")
            if state == "active_allocated":
                allocated += bytes_
                pool[2] += bytes_
                frame = _frame_of(block)
                if frame is None or (frame not in shares and len(shares) >= MOST_FRAMES):
                    unknown += bytes_
                else:
                    share = shares.setdefault(frame, [0, 0])
                    share[0] += bytes_
                    share[1] += 1
            elif state == "inactive":
                inactive += bytes_
                private_unused += bytes_ if is_private else 0
                largest = max(largest, 0 if is_private else bytes_)
                if serves:
                    usable += bytes_
                    largest_usable = max(largest_usable, bytes_)
            elif state in PENDING:
                pending += bytes_
            else:
                raise NotASnapshotError(
                    f"a block in it has the state {clean(str(state)[:60], 60)}; known are active_allocated, inactive, {', '.join(PENDING)}"
                )
    top = sorted(shares.items(), key=lambda item: -item[1][0])[:MOST_SHARES]
    return DeviceMemory(
        device=device,
        segments=len(segments),
        expandable=any(segment.get("is_expandable") is True for segment in segments),
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        pending_bytes=pending,
        inactive_bytes=inactive,
        largest_inactive_bytes=largest,
        private_pools_bytes=private,
        private_unused_bytes=private_unused,
        pools=tuple(
            Pool(stream, bool(pool_id), sums[0], sums[1], sums[2], pool_id)
            for (stream, pool_id), sums in sorted(pools.items(), key=lambda p: -p[1][1])[:MOST_POOLS]
        ),
        largest=tuple(FrameShare(frame, sums[0], sums[1]) for frame, sums in top),
        without_frames_bytes=unknown,
        last_oom=oom.value(usable, largest_usable) if oom is not None else None,
    )


def _is_private(segment: dict[Any, Any]) -> bool:
    return _is_private_id(segment.get("segment_pool_id"))


def _is_private_id(pool: Any) -> bool:
    return isinstance(pool, (tuple, list)) and any(isinstance(part, int) and part != 0 for part in pool)


def _pool_id(segment: dict[Any, Any]) -> tuple[int, ...]:
    """The numbers of a private pool; none for the common one."""
    pool: Any = segment.get("segment_pool_id")
    return tuple(_int(part) for part in pool[:2]) if _is_private_id(pool) else ()


def _frame_of(block: dict[Any, Any]) -> str | None:
    """The innermost frame outside torch's own files; of torch 2.0 from the block's history."""
    frames = block.get("frames")
    if not frames:
        frames = next((entry.get("frames") for entry in _dicts(block.get("history"))), None)
    return _frame(frames)


def _frame(frames: Any) -> str | None:
    first = None
    for entry in _dicts(frames, most=100):
        name = str(entry.get("filename", ""))[:500]
        shown = f"{_short(name)}:{_int(entry.get('line', 0))} {str(entry.get('name', ''))[:100]}"
        first = first or shown
        if name.endswith(".py") and "/torch/" not in name:
            return clean(shown, 200)
    return clean(first, 200) if first is not None else None


def _short(name: str) -> str:
    """The last parts of a path: folders above say where somebody lives."""
    return "/".join(name.split("/")[-3:])


class _Oom(msgspec.Struct, frozen=True):
    """A failed request, and who asked."""

    size: int
    free: int | None
    frame: str | None
    stream: int | None
    private: bool

    @property
    def placed(self) -> bool:
        """Whether it is known where torch may place it."""
        return self.stream is not None and not self.private

    def may_have(self, segment: dict[Any, Any]) -> bool:
        """Whether torch may serve it from this segment: pieces of another stream, kind or pool are never used."""
        kind = "small" if self.size <= SMALL_BYTES else "large"
        return (
            self.placed
            and segment.get("stream", 0) == self.stream
            and segment.get("segment_type", kind) == kind
            and not _is_private(segment)
        )

    def value(self, usable: int, largest: int) -> LastOom:
        """With what lay free for it."""
        known = self.placed
        return LastOom(self.size, self.free, self.frame, usable if known else None, largest if known else None)


def _last_ooms(traces: Any, budget: _Budget) -> dict[int, _Oom]:
    found: dict[int, _Oom] = {}
    if not isinstance(traces, list):
        return found
    for device, trace in enumerate(traces[:MOST_DEVICES]):
        for entry in _dicts(trace):
            budget.take()
            if entry.get("action") == "oom":
                free, stream = entry.get("device_free"), entry.get("stream")
                found[device] = _Oom(
                    _size(entry.get("size")),
                    _size(free) if free is not None else None,
                    _frame(entry.get("frames")),
                    _int(stream) if stream is not None else None,
                    _is_private_id(entry.get("pool_id")),
                )
    return found


def _settings(settings: Any) -> dict[str, str]:
    if not isinstance(settings, dict):
        return {}
    plain = (str, int, float, bool)
    kept = [(k, v) for k, v in settings.items() if isinstance(k, str) and isinstance(v, plain)]
    return {clean(k, 60): clean(str(v), 120) for k, v in kept[:_SAFE_SETTINGS]}


def _dicts(value: Any, most: int | None = None) -> Iterator[dict[Any, Any]]:
    entries: Iterable[Any] = value if isinstance(value, (list, tuple)) else ()
    for at, entry in enumerate(entries):
        if most is not None and at >= most:
            return
        if isinstance(entry, dict):
            yield entry


def _int(value: Any) -> int:
    """A size or number; anything else is no snapshot's."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise NotASnapshotError("a pickle of something else: a size in it is no number that a device can have")
    return value


def _size(value: Any) -> int:
    """A number that can't be negative: a size, a device's number."""
    if _int(value) < 0:
        raise NotASnapshotError("a pickle of something else: a size in it is negative")
    return _int(value)
