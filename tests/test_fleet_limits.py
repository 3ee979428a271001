"""What one file may take: an alarm that no handler of errors swallows, an end where a library does not come back, a bound on memory."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from memledger.fleet.limits import TimeLimitError, time_limit


def test_work_that_does_not_end_is_ended():
    with pytest.raises(TimeLimitError), time_limit(0.05):
        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue


def test_work_in_its_time_is_let_be_and_the_alarm_is_gone():
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(1000):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_thread_that_has_no_alarm_is_let_be():
    done = []

    def work():
        with time_limit(1000):
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def ended(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_a_process_whose_alarm_does_not_come_through_ends_itself():
    done = ended(
        "import signal, time\n"
        "from memledger.fleet import limits\n"
        "limits.GRACE_SECONDS = 0.1\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n"
        "with limits.time_limit(0.1):\n"
        "    time.sleep(1000)\n"
    )
    assert (done.returncode, done.stderr) == (1, "")


def test_memory_beyond_the_bound_is_an_error_and_less_is_none():
    done = ended(
        "from memledger.fleet.limits import limit_memory\n"
        "limit_memory(2**26)\n"
        "some = bytearray(2**25)\n"
        "try:\n"
        "    bytearray(2**27)\n"
        "except MemoryError:\n"
        "    print('bounded', len(some))\n"
    )
    assert (done.stdout, done.stderr) == (f"bounded {2**25}\n", "")
