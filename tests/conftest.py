"""What every test runs under: no verdict hangs on how busy the machine is, or on the luck of a draw.

`make test` draws the same examples every time. `make test-all` draws new ones, to look further.
"""

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from bqsgd._src.runtime.compiling import notice
from fault_book import BOOK_VARIABLE, FaultBook

# Tests run beside each other, one a core, so a second thread of a library only gets in the way: numpy's takes a third
# more processor time for the accountant's sums, and torch's spin while they wait for work. Read when they are loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Before the first backward of the process: torch then asks which accelerators there are, and never again.
import sim_device

# A ledger has the disk confirm every spend, some thousand times in a test run; memory confirms at once.
MEMORY = Path("/dev/shm")
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Tests start some hundred processes, and each would compile the package's sources again if none kept the result.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile(
    "same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, max_examples=50
)
settings.register_profile("fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# A shell that starts a job in the background has it ignore Ctrl-C, and a process hands that on to its children. Tests
# of interrupts would then wait for ever, here and in the processes they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


notice.said = True  # which test compiles a loop first is chance, and what a command prints or logs is compared
logging.getLogger("numba").setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """made_once(name, make): what `make` returns, as JSON; of all workers of a test run only one calls it."""
    shared = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent

    def made(name: str, make: Callable[[], Any]) -> Any:
        path = shared / f"{name}.json"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_text(json.dumps(make()), encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))

    return made


@pytest.fixture
def fault_book(request):
    """Rows of the fault table, kept only when the test passes."""
    book = FaultBook(request.node.nodeid)
    yield book
    if not request.node.failed_in_call:
        book.close()


def pytest_collection_modifyitems(config, items):
    """With a book to fill, only the tests that write in it are run."""
    if BOOK_VARIABLE in os.environ:
        kept = [item for item in items if "fault_book" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        item.failed_in_call = report.failed
    return report


@pytest.fixture
def sim() -> Iterator[Any]:
    """The simulated accelerator, in use for one test: `tests/sim_device.py`."""
    sim_device.module.initialized = True
    sim_device.left.clear()
    yield sim_device
    sim_device.module.initialized = False
