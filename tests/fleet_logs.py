"""Small logs for the fleet's tests, and readers that misbehave in a worker."""

import os
import signal
import time
from pathlib import Path

from memledger.fleet import one
from memledger.fleet.one import Outcome, Settings, Work

FIXTURES = Path(__file__).parent.parent / "fixtures"
DEMO = FIXTURES / "demo" / "server.log"


def parquet():
    """pyarrow's Parquet, loaded when it is used: it starts threads, beside which no test of a fork can run."""
    import pyarrow.parquet

    return pyarrow.parquet


LOG = """\
[2026-09-09 11:50:01] server_args=ServerArgs(model_path='/models/example-{number}b', tp_size=1, mem_fraction_static=0.85)
[2026-09-09 11:50:20] Load weight begin. avail mem=78.50 GB
[2026-09-09 11:51:20] Load weight end. elapsed=60.1 s, type=ExampleForCausalLM, avail mem={loaded:.2f} GB, mem usage={weights:.2f} GB.
[2026-09-09 11:51:24] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 163840, K size: 5.00 GB, V size: 5.00 GB
[2026-09-09 11:51:24] Memory pool end. avail mem={pooled:.2f} GB
[2026-09-09 11:51:40] max_total_num_tokens=163840, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=32, context_len=32768, available_gpu_mem={pooled:.2f} GB
[2026-09-09 11:52:40] Decode batch. #running-req: 3, #token: 1000, token usage: 0.25, cuda graph: True, gen throughput (token/s): 90.00, #queue-req: 0
"""


def log(number: int) -> str:
    """A log whose figures tell its number."""
    return LOG.format(number=number, weights=10 + number, loaded=68.5 - number, pooled=58.5 - number)


def write_logs(folder: Path, count: int) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{number:03d}.log" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_text(log(number))
    return paths


def crashing(work: Work, settings: Settings) -> Outcome:
    """Ends its process over files that are called so."""
    if "crash" in work.name:
        os.kill(os.getpid(), signal.SIGSEGV)
    return one.read(work, settings)


def killed_once(work: Work, settings: Settings) -> Outcome:
    """Ends its process the first time that it meets a file that is called so."""
    marker = Path(f"{work.name}.seen")
    if "once" in work.name and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return one.read(work, settings)


def stopped(work: Work, settings: Settings) -> Outcome:
    """A process that does nothing any more, not even end."""
    if "stop" in work.name:
        os.kill(os.getpid(), signal.SIGSTOP)
    return one.read(work, settings)


def busy_or_hungry(work: Work, settings: Settings) -> Outcome:
    """Never ends, or takes all memory, where the log would be read."""
    if "busy" in work.name:
        one._read = _for_ever
    elif "hungry" in work.name:
        one._read = _all_memory
    elif "faulty" in work.name:
        one._read = _faulty
    else:
        one._read = READ
    return one.read(work, settings)


READ = one._read


def _for_ever(work: Work, settings: Settings) -> Outcome:
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue  # what handles every error must not take the end of its time for one


def _all_memory(work: Work, settings: Settings) -> Outcome:
    return bytearray(4 * settings.memory_limit_bytes) and READ(work, settings)


def _faulty(work: Work, settings: Settings) -> Outcome:
    raise ZeroDivisionError("token=abcdefghijklmnop0123 was not divided")
