"""Memory of a previous start: whether what another process held is what an earlier start of the same log had taken."""

from __future__ import annotations

from typing import Final

from memledger import words as n
from memledger.frameworks.torch_oom import seconds_between
from memledger.ledger import Rank, Report, held
from memledger.postmortem.host import pids_of
from memledger.postmortem.incident import Candidate, Numbers
from memledger.postmortem.symptom import Symptom
from memledger.units import GIB

LEAST_SHARE: Final = 0.6
"""Of what others held, the printed parts of an earlier start must be this much: contexts and activations are not printed."""
SPREAD: Final = GIB // 10
LONGEST_SECONDS: Final = 3600.0


def previous_start(report: Report, index: int | None, root: Symptom, numbers: Numbers) -> Candidate | None:
    """The earlier start whose workers may still hold the memory; None where no start of this log fits."""
    taken = held_by_others(numbers)
    if index is None or index == 0 or taken is None:
        return None
    earlier = report.servers[index - 1]
    if not any(span.input == root.input and span.last_line < root.line for span in earlier.span):
        return None
    listed = {other.pid for other in numbers.other_processes if other.pid is not None}
    same = sorted(listed & pids_of(earlier))
    apart = seconds_between(earlier.ended_at, root.time)
    if same:
        text = f"Process {same[0]}, which holds memory here, is of the start before in this log: it was not ended."
        return Candidate("other_process", text, f"kill {same[0]}", previous_start=True)
    sizes = [held(rank.entries).bytes for rank in earlier.ranks]
    fitting = [size for size in sizes if LEAST_SHARE * taken <= size <= taken + SPREAD]
    if not fitting or (apart is not None and not 0 <= apart <= LONGEST_SECONDS):
        return None
    rank = earlier.ranks[sizes.index(fitting[0])]
    after = f" (its last line is {apart:.0f} s earlier)" if apart is not None else ""
    text = (
        f"The start before in this log{after} had taken {n.gib_about(fitting[0])} by its own lines ({_parts(rank)}), "
        f"and {n.gib_about(taken)} were held: its workers may still be there."
    )
    pids = sorted(pids_of(earlier))
    command = (
        f"ps -o pid,ppid,lstart,args -p {','.join(map(str, pids[:16]))}" if pids else "ps -eo pid,ppid,lstart,args"
    )
    return Candidate("other_process", text, command, previous_start=True)


def held_by_others(numbers: Numbers) -> int | None:
    """What others held: those listed, else what is neither free nor this process's."""
    listed = [other.bytes for other in numbers.other_processes if other.bytes]
    if listed:
        return sum(listed)
    if numbers.unaccounted_bytes is not None:
        return numbers.unaccounted_bytes if numbers.unaccounted_bytes > 0 else None
    if numbers.total_bytes is not None and numbers.free_bytes is not None and numbers.process_bytes is None:
        return numbers.total_bytes - numbers.free_bytes
    return None


def _parts(rank: Rank) -> str:
    largest = sorted((e for e in rank.entries if e.account != "free"), key=lambda e: -e.bytes)[:3]
    return ", ".join(f"{e.account.partition('/')[0].replace('_', ' ')} {n.gib(e.bytes)}" for e in largest)
