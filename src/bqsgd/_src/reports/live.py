"""`bqsgd watch`: the report of a run that is going on, served to browsers on this machine.

The server answers GET and HEAD of one address, `/`, with a page that is rendered from the run folder; no request names
a file. It listens on the loopback address only, and a browser that was led here under another name (DNS rebinding) is
refused by its Host header. What it shows is public; anybody with an account on this machine can ask for it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from bqsgd._src.errors import BqsgdError, InvalidParameter
from bqsgd._src.privacy.guarantee import as_given, rounded_up
from bqsgd._src.records.folder import CONFIG, ROUNDS, SUMMARY, History
from bqsgd._src.records.record import Status
from bqsgd._src.reports.page import flatten, message_page, read_run, run_page
from bqsgd._src.storage import has_writer

_log = logging.getLogger("bqsgd.watch")
LOOPBACK = "127.0.0.1"
_REFRESH_SECONDS = 3
_REQUEST_SECONDS = 10
"""A browser that sends its request more slowly than this is cut off."""
_MOST_NAMED = 5
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class LivePage:
    """The page of a run folder as it is now. It is rendered again only if a file of the folder has changed."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._seen: tuple[object, ...] = ()
        self._page, self._finished = b"", False

    def now(self) -> tuple[bytes, bool]:
        """The page, and whether the run has ended, after which it needs no refresh."""
        with self._lock:
            seen = (*(_stamp(self.folder / name) for name in (CONFIG, ROUNDS, SUMMARY)), has_writer(self.folder))
            if seen != self._seen or not self._page:
                page, self._finished = self._render()
                self._page, self._seen = page.encode(), seen
            return self._page, self._finished

    def _render(self) -> tuple[str, bool]:
        name = self.folder.resolve().name
        if not any((self.folder / file).exists() for file in (ROUNDS, SUMMARY)):
            return message_page(name, "Waiting", "The run has not written a round yet. This page refreshes."), False
        try:
            run = read_run(self.folder)
            return run_page(run, live=progress(run, self.folder)), run.summary is not None
        except BqsgdError as error:
            # It may be half written, and whole at the next look.
            return message_page(name, "This run folder cannot be shown", str(error)), False


def progress(run: History, folder: Path) -> tuple[str, str] | None:
    """Where a run that has not ended is: its rounds, the epsilon spent, and who answered last. None if it has ended.

    The title says whether there is a process that goes on with it.
    """
    last = run.last
    if run.summary is not None or last is None:
        return None
    settings = {name.rpartition(".")[2]: value for name, value in flatten(run.config)}
    rounds, delta = settings.get("rounds"), settings.get("delta")
    done = f"{run.figures.rounds}{f' of {rounds}' if rounds else ''} rounds"
    spent = [record.epsilon_max for record in run.rounds if record.epsilon_max is not None]
    sentences = [f"{done}, the last at {_written(folder / ROUNDS)}"]
    if run.figures.seeded:
        sentences.append("its noise is seeded, so there is no privacy claim")
    elif spent:
        sentences.append(
            f"the client that spent most has spent epsilon {rounded_up(spent[-1])}"
            + (f" at delta {as_given(float(delta))}" if delta is not None and _is_number(delta) else "")
            + " (proven; the claim with its terms comes when the run ends)"
        )
    answers = Counter(entry.status for entry in last.clients)
    if last.clients:
        sentences.append(f"{answers[Status.OK]} of {len(last.clients)} clients answered in the last round")
    silent = [entry for entry in last.clients if entry.status is not Status.OK]
    named = [f"client {entry.client} {entry.status}" for entry in silent[:_MOST_NAMED] if entry.client is not None]
    if named:
        sentences.append(", ".join(named) + (f" and {len(silent) - len(named)} more" * (len(silent) > len(named))))
    if has_writer(folder):
        return "Running", "; ".join(sentences) + "."
    stopped = (
        "no process of this machine writes this folder: the run was killed, and `bqsgd train --resume` continues it"
    )
    return "Not running", "; ".join([*sentences, stopped]) + "."


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _written(path: Path) -> str:
    stamp = _stamp(path)
    return "an unknown time" if stamp is None else datetime.fromtimestamp(stamp[0] / 1e9, UTC).strftime("%H:%M:%S UTC")


def _stamp(path: Path) -> tuple[int, int] | None:
    """When a file was written, and its size; None if there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, page: LivePage, port: int) -> None:
        self.page = page
        super().__init__((LOOPBACK, port), _Handler)
        self.hosts = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}

    def server_bind(self) -> None:
        """Bind without asking a name server for our own name, which HTTPServer does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks off is no event."""
        _log.debug("a request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_SECONDS
    server_version, sys_version = "bqsgd", ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        status, refresh = HTTPStatus.OK, False
        if self.headers.get_all("Host") not in [[host] for host in self.server.hosts]:
            # A name that somebody else's DNS server resolved to this machine: its pages must not read this one.
            status, page = HTTPStatus.MISDIRECTED_REQUEST, b"ask for 127.0.0.1 or localhost\n"
        elif self.path != "/":
            status, page = HTTPStatus.NOT_FOUND, b"there is one page: /\n"
        else:
            try:
                page, finished = self.server.page.now()
                refresh = not finished
            except Exception:  # whatever a folder does to us, its text is not sent
                _log.debug("the page could not be made", exc_info=True)
                status, page, refresh = HTTPStatus.INTERNAL_SERVER_ERROR, b"the page could not be made\n", True
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if refresh:
            self.send_header("Refresh", str(_REFRESH_SECONDS))
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if with_body:
            self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: requests are text from strangers."""


@contextmanager
def watching(folder: str | Path, *, port: int) -> Iterator[ThreadingHTTPServer]:
    """A server for this folder; `serve_forever` runs it. Port 0 takes any free port.

    Raises:
        InvalidParameter: the port is taken or not allowed.
    """
    try:
        server = _Server(LivePage(folder), port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidParameter(
            f"port {port} cannot be used ({reason}); choose another with --port, 0 for any"
        ) from error
    with server:
        yield server
