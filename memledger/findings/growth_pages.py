"""The pages of ML010 to ML016: what a watch, or a recording of one, saw grow (`memledger.watch.growth_findings`)."""

from __future__ import annotations

from typing import Final

from memledger.findings.page import Page

GROWTH: Final[tuple[Page, ...]] = (
    Page(
        "ML010",
        "memory grows at the same load",
        "warning; error where the GPU is full within an hour",
        "The server's own process takes more and more of its GPU, in every third of the time, and not when its load passed what it had "
        "been before: a leak, or fragmentation that goes on. The slope is Theil's and Sen's, with the interval that holds it 19 times in 20.",
        "With memledger watch, or of a recording: at least 12 looks over a minute; the slope's interval is above zero, each third of the "
        "time has its share, no single step is most of it.",
        "Growth of up to 32 MiB; growth that came with new peaks of load (ML011).",
        "Record for longer (memledger watch --record), then look at torch.cuda.memory_snapshot at two times (memledger oom reads it). "
        "Restart before the GPU is full.",
    ),
    Page(
        "ML011",
        "allocator growth",
        "note; warning where the GPU is full within a day",
        "The server's process took more, in a step, for a while, or as its load rose above what it had been before: torch's allocator "
        "keeps what the largest batches took.",
        "As ML010, where growth ended, came in one step or by fits and starts, or 70 % of it came with new peaks of running requests or "
        "of the pools' use.",
        "Growth of up to 32 MiB.",
        "Nothing, where room is left. Else lower the memory fraction, or the chunk size of prefill, so that the largest batch fits.",
    ),
    Page(
        "ML012",
        "other processes grow",
        "warning; error where the GPU is full within an hour",
        "Processes that are not the server's take more and more of its GPU.",
        "With memledger watch, or of a recording: what others hold on one GPU rose by more than 32 MiB.",
        "The driver lists no processes (WSL, containers).",
        "Move or end them; the server can't shrink its pools for them.",
    ),
    Page(
        "ML013",
        "a pool fills",
        "note",
        "The use of the KV cache or of the recurrent state's slots rises steadily. The pool was reserved at the start: the device's memory "
        "does not change by it.",
        "With memledger watch, or of a recording: the usage rose in every third of the time, by more than 5 points.",
        "No metrics and no serving lines are there.",
        "Nothing against OOM: a full pool makes requests wait or be preempted. More room: memledger plan.",
    ),
    Page(
        "ML014",
        "host memory grows",
        "warning",
        "The server's processes take more and more of the host's memory.",
        "With memledger watch, or of a recording: their resident memory rose in every third of the time, by more than 256 MiB.",
        "/proc does not show it (other users' processes).",
        "Record for longer; the kernel's OOM killer, or the container's limit, ends the server when it is used up.",
    ),
    Page(
        "ML015",
        "memory of no listed process grows",
        "warning",
        "More and more is in use than all listed processes, the driver's part and free memory account for.",
        "With memledger watch, or of a recording: what is nobody's rose by more than 32 MiB.",
        "The driver gives no figures by process.",
        "Look on the host: sudo fuser -v /dev/nvidia* names who has the device open.",
    ),
    Page(
        "ML016",
        "memory is flat",
        "info",
        "What the server's processes hold did not grow while they were watched.",
        "With memledger watch, or of a recording: at least 12 looks over a minute, and no finding of growth.",
        "Anything grew.",
        "Nothing. An OOM after hours needs hours of recording to be seen coming.",
    ),
)
