"""The durable file under a ledger: SQLite as append-only lists of texts that survive kill -9 and power loss.

journal_mode=DELETE with synchronous=EXTRA: in DELETE mode a commit *is* the removal of the journal, and only EXTRA
syncs the folder after it, so with FULL a power cut can bring the journal back and undo a commit, which here would be an
under-count. WAL with FULL is as durable, but a copy of the main file alone would silently lack the last rounds.

A file holds the list of one client (a ledger), or the lists of many (a register). Every text is chained to the one
before by SHA-256 and the head of each chain is kept beside them. That finds damage and careless edits (a line changed,
removed or cut off), not an owner who rewrites the whole chain or restores an old copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bqsgd.errors import LedgerError, NotWritten, UnsafeFile
from bqsgd.storage import draft, open_regular

APPLICATION_ID = 0x62715347
BUSY_SECONDS = 60.0
MAX_BYTES = 1 << 30
_REOPEN = "a write to it failed; open it again"


@dataclass(frozen=True, kw_only=True)
class Form:
    """How the lists lie in the file. Statements name their values; `clients` counts the heads that there must be."""

    format: int
    schema: tuple[str, ...]
    clients: str
    heads: str
    add_head: str
    read: str
    add: str
    move_head: str


LEDGER = Form(
    format=1,
    schema=(
        "CREATE TABLE entries (number INTEGER PRIMARY KEY, body TEXT NOT NULL, chain BLOB NOT NULL)",
        "CREATE TABLE head (only INTEGER PRIMARY KEY CHECK (only = 1), client INTEGER NOT NULL, "
        "count INTEGER NOT NULL, chain BLOB NOT NULL)",
    ),
    clients="SELECT 1",
    heads="SELECT client FROM head",
    add_head="INSERT INTO head VALUES (1, :client, :number, :chain)",
    read="SELECT h.count, h.chain, e.number, e.body, e.chain FROM head h LEFT JOIN entries e ON e.number > :after "
    "WHERE h.client = :client ORDER BY e.number",
    add="INSERT INTO entries VALUES (:number, :body, :chain)",
    move_head="UPDATE head SET count = :number, chain = :chain",
)
REGISTER = Form(
    format=2,
    schema=(
        "CREATE TABLE entries (client INTEGER NOT NULL, number INTEGER NOT NULL, body TEXT NOT NULL, "
        "chain BLOB NOT NULL, PRIMARY KEY (client, number)) WITHOUT ROWID",
        "CREATE TABLE heads (client INTEGER PRIMARY KEY, count INTEGER NOT NULL, chain BLOB NOT NULL)",
        "CREATE TABLE register (only INTEGER PRIMARY KEY CHECK (only = 1), clients INTEGER NOT NULL)",
    ),
    clients="SELECT clients FROM register",
    heads="SELECT client FROM heads ORDER BY client",
    add_head="INSERT INTO heads VALUES (:client, :number, :chain)",
    read="SELECT h.count, h.chain, e.number, e.body, e.chain FROM heads h LEFT JOIN entries e ON e.client = h.client "
    "AND e.number > :after WHERE h.client = :client ORDER BY e.number",
    add="INSERT INTO entries VALUES (:client, :number, :body, :chain)",
    move_head="UPDATE heads SET count = :number, chain = :chain WHERE client = :client",
)
_FORMS = {form.format: form for form in (LEDGER, REGISTER)}


def _origin(client: int) -> bytes:
    return hashlib.sha256(f"bqsgd.ledger.v1 client {client}".encode()).digest()


def _link(previous: bytes, body: str) -> bytes:
    return hashlib.sha256(previous + body.encode()).digest()


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn SQLite's own errors into a LedgerError that says what to do."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise LedgerError(
            f"ledger {path} could not be used ({error}); nothing was recorded: check that the disk is not full, that "
            f"the folder is writable and that no other process holds the file for more than {BUSY_SECONDS:.0f} s"
        ) from error
    except (sqlite3.DatabaseError, UnicodeDecodeError, TypeError, IndexError) as error:
        # SQLite's message may quote bytes of the file; a query without a row gives None.
        raise LedgerError(
            f"{path} is not a readable ledger ({error}); restore it from a backup, do not start a new one"
        ) from error


def create_ledger(path: Path, *, client: int, first_body: str) -> None:
    """Make a ledger with its first entry, whole or not at all; does nothing when another process was faster."""
    _create(path, LEDGER, {client: first_body})


def create_register(path: Path, first_bodies: Mapping[int, str]) -> None:
    """Make a register of these clients, each with its first entry; as `create_ledger`."""
    _create(path, REGISTER, first_bodies)


def _create(path: Path, form: Form, first_bodies: Mapping[int, str]) -> None:
    """The file is written under another name and renamed into place, so a half-made one never has the ledger's name,
    and an empty file under that name is always damage."""
    try:
        with draft(path) as (_, name):
            if path.exists():  # the draft is locked, so nobody else is making it now
                return
            Path(f"{name}-journal").unlink(missing_ok=True)  # of a process that was killed here
            with _explained(path), contextlib.closing(_connect(name, mode="rw")) as connection:
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {form.format}")
                connection.execute("BEGIN IMMEDIATE")
                for statement in form.schema:
                    connection.execute(statement)
                if form is REGISTER:
                    connection.execute("INSERT INTO register VALUES (1, ?)", (len(first_bodies),))
                for client, body in first_bodies.items():
                    row = {"client": client, "number": 1, "body": body, "chain": _link(_origin(client), body)}
                    connection.execute(form.add, row)
                    connection.execute(form.add_head, row)
                connection.execute("COMMIT")
            os.rename(name, path)
    except (NotWritten, UnsafeFile) as error:
        raise LedgerError(f"ledger {path} could not be made ({error}); give a path in a writable folder") from error


def _connect(path: Path, *, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,  # whoever uses the file holds its lock
    )
    try:
        for pragma in ("trusted_schema = OFF", "synchronous = EXTRA", "fullfsync = ON"):
            connection.execute(f"PRAGMA {pragma}")
        if mode != "ro":
            connection.execute("PRAGMA journal_mode = DELETE")
    except BaseException:
        connection.close()
        raise
    return connection


class LedgerFile:
    """An open file: whose lists it holds, and the one transaction that may be open.

    lock: held by whichever thread uses the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.RLock()
        self.broken = False
        """A write of several ledgers together failed; nothing more is taken."""
        self._writing, self._pid = False, os.getpid()
        try:
            file = open_regular(path, limit=MAX_BYTES)
        except UnsafeFile as error:
            raise LedgerError(f"{error}; a ledger is one") from error
        if file is None:
            raise LedgerError(f"no ledger at {path}; if this client has spent before, restore the file from a backup")
        with file:
            if not file.read(1):
                raise LedgerError(
                    f"{path} is empty: a ledger never is; restore it from a backup, do not start a new one"
                )
        with _explained(path):
            # A journal left by a crash is rolled back by the first reader, which takes the right to write.
            self.connection = _connect(path, mode="rw" if os.access(path, os.W_OK) else "ro")
            try:
                self.form = self._checked_form()
                self.clients = self._read_clients()
            except BaseException:
                self.connection.close()
                raise
        self._identity = self._file_identity()

    @property
    def mine(self) -> bool:
        """Whether this process opened the file (a forked child did not)."""
        return os.getpid() == self._pid

    @property
    def many(self) -> bool:
        """Whether it is a register."""
        return self.form is REGISTER

    def _file_identity(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _checked_form(self) -> Form:
        query = self.connection.execute
        found = (query("PRAGMA application_id").fetchone()[0], query("PRAGMA user_version").fetchone()[0])
        if found[0] != APPLICATION_ID:
            raise LedgerError(f"{self.path} is an SQLite file but not a bqsgd ledger; give the ledger's own path")
        if found[1] not in _FORMS:
            known = " and ".join(map(str, _FORMS))
            raise LedgerError(
                f"{self.path} has ledger format {found[1]}, this version reads {known}; use a matching bqsgd"
            )
        form = _FORMS[found[1]]
        if {row[0] for row in query("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")} != set(form.schema):
            raise LedgerError(
                f"{self.path} was changed by another program (foreign tables or triggers); restore a backup"
            )
        if query("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise LedgerError(f"{self.path} is damaged; restore it from a backup, do not start a new one")
        return form

    def _read_clients(self) -> tuple[int, ...]:
        clients = [row[0] for row in self.connection.execute(self.form.heads).fetchall()]
        expected = self.connection.execute(self.form.clients).fetchall()
        if len(expected) != 1 or len(clients) != expected[0][0] or not clients:
            raise LedgerError(f"{self.path} is damaged; restore it from a backup, do not start a new one")
        strange = next((client for client in clients if not isinstance(client, int)), None)
        if strange is not None:
            raise LedgerError(f"{self.path} is damaged (its client is {strange!r}); restore it from a backup")
        return tuple(clients)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the write lock; what was written inside is durable on a normal exit and gone on any exception.

        Inside another such block of the same file it is part of that one, and durable when that one ends. Should that
        one fail, the file takes nothing more: what its users hold in memory is then ahead of it.
        """
        with self.lock:
            if self.broken:
                raise LedgerError(f"{self.path}: {_REOPEN}")
            if self._writing:
                yield
                return
            if self._file_identity() != self._identity:
                raise LedgerError(
                    f"{self.path} was moved or replaced while open; put the ledger back and open it again"
                )
            with _explained(self.path):
                self.connection.execute("BEGIN IMMEDIATE")
            self._writing = True
            try:
                yield
                with _explained(self.path):
                    self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise
            finally:
                self._writing = False

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Everything that is recorded inside is one durable write."""
        try:
            with self.exclusive():
                yield
        except BaseException:
            self.broken = True
            raise

    def close(self) -> None:
        """Close the file."""
        self.connection.close()


class Store:
    """One client's list in an open file: `fresh()` reads what is new, `append()` adds, inside `exclusive()`."""

    def __init__(self, file: LedgerFile, client: int) -> None:
        if client not in file.clients:
            raise LedgerError(f"{file.path} holds no ledger of client {client}")
        self.file, self.client = file, client
        self._count, self._chain = self._kept = 0, _origin(client)
        """How far it was read or written; `_kept` is what stands if a write fails."""

    def fresh(self) -> list[str]:
        """The texts added since the last call (all of them at first), checked against the chain."""
        path = self.file.path
        with _explained(path):
            joined = self.file.connection.execute(
                self.file.form.read, {"client": self.client, "after": self._count}
            ).fetchall()
            count, head = joined[0][:2]
        rows = [row[2:] for row in joined if row[2] is not None]
        chain, number = self._chain, self._count
        for found, body, stored in rows:
            number += 1
            chain = _link(chain, body) if isinstance(body, str) else b""
            if found != number or chain != stored:
                raise LedgerError(f"entry {found} of {path} was altered or removed; restore the ledger from a backup")
        if number != count or chain != head:
            raise LedgerError(f"{path} lost entries ({number} of {count} found); restore the ledger from a backup")
        self._count, self._chain = self._kept = number, chain
        return [body for _, body, _ in rows]

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """As that of the file; on any exception this list is as it was last read."""
        try:
            with self.file.exclusive():
                yield
            self._kept = self._count, self._chain
        except BaseException:
            self._count, self._chain = self._kept
            raise

    def append(self, body: str) -> None:
        """Add one text; call inside `exclusive()` and after `fresh()`."""
        row = {"client": self.client, "number": self._count + 1, "body": body, "chain": _link(self._chain, body)}
        with _explained(self.file.path):
            self.file.connection.execute(self.file.form.add, row)
            self.file.connection.execute(self.file.form.move_head, row)
        self._count, self._chain = self._count + 1, _link(self._chain, body)
