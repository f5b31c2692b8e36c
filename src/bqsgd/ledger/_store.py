"""The durable file under a ledger: SQLite as an append-only list of texts that survives kill -9 and power loss.

journal_mode=DELETE with synchronous=EXTRA: in DELETE mode a commit *is* the removal of the journal, and only EXTRA
syncs the folder after it, so with FULL a power cut can bring the journal back and undo a commit, which here would be an
under-count. WAL with FULL is as durable, but a copy of the main file alone would silently lack the last rounds.

Every text is chained to the one before by SHA-256 and the head of the chain is kept beside them. That finds damage and
careless edits (a line changed, removed or cut off), not an owner who rewrites the whole chain or restores an old copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from bqsgd.errors import LedgerError, NotWritten, UnsafeFile
from bqsgd.storage import draft, open_regular

APPLICATION_ID = 0x62715347
LEDGER_FORMAT = 1
BUSY_SECONDS = 60.0
MAX_BYTES = 1 << 30
_SCHEMA = (
    "CREATE TABLE entries (number INTEGER PRIMARY KEY, body TEXT NOT NULL, chain BLOB NOT NULL)",
    "CREATE TABLE head (only INTEGER PRIMARY KEY CHECK (only = 1), client INTEGER NOT NULL, count INTEGER NOT NULL, "
    "chain BLOB NOT NULL)",
)


def _origin(client: int) -> bytes:
    return hashlib.sha256(f"bqsgd.ledger.v{LEDGER_FORMAT} client {client}".encode()).digest()


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


def create(path: Path, *, client: int, first_body: str) -> None:
    """Make a ledger with its first entry, whole or not at all; does nothing when another process was faster.

    The file is written under another name and renamed into place, so a half-made ledger never has the ledger's name,
    and an empty file under that name is always damage.
    """
    try:
        with draft(path) as (_, name):
            if path.exists():  # the draft is locked, so nobody else is making it now
                return
            Path(f"{name}-journal").unlink(missing_ok=True)  # of a process that was killed here
            with _explained(path), contextlib.closing(_connect(name, mode="rw")) as connection:
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {LEDGER_FORMAT}")
                connection.execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA:
                    connection.execute(statement)
                chain = _link(_origin(client), first_body)
                connection.execute("INSERT INTO entries VALUES (1, ?, ?)", (first_body, chain))
                connection.execute("INSERT INTO head VALUES (1, ?, 1, ?)", (client, chain))
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
        check_same_thread=False,  # the ledger above holds a lock
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


class Store:
    """An open ledger file: `fresh()` reads what is new, `append()` adds durably, `exclusive()` holds the write lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count = 0
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
            self._connection = _connect(path, mode="rw" if os.access(path, os.W_OK) else "ro")
            try:
                self._check_file()
                client = self._connection.execute("SELECT client FROM head").fetchone()[0]
                if not isinstance(client, int):
                    raise LedgerError(f"{path} is damaged (its client is {client!r}); restore it from a backup")
                self.client: int = client
            except BaseException:
                self._connection.close()
                raise
        self._chain = _origin(self.client)
        self._durable = self._count, self._chain
        self._identity = self._file_identity()

    def _file_identity(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _check_file(self) -> None:
        query = self._connection.execute
        found = (query("PRAGMA application_id").fetchone()[0], query("PRAGMA user_version").fetchone()[0])
        if found[0] != APPLICATION_ID:
            raise LedgerError(f"{self.path} is an SQLite file but not a bqsgd ledger; give the ledger's own path")
        if found[1] != LEDGER_FORMAT:
            raise LedgerError(
                f"{self.path} has ledger format {found[1]}, this version reads {LEDGER_FORMAT}; use a matching bqsgd"
            )
        if {row[0] for row in query("SELECT sql FROM sqlite_master")} != set(_SCHEMA):
            raise LedgerError(
                f"{self.path} was changed by another program (foreign tables or triggers); restore a backup"
            )
        if (
            query("PRAGMA quick_check(1)").fetchone()[0] != "ok"
            or query("SELECT count(*) FROM head").fetchone()[0] != 1
        ):
            raise LedgerError(f"{self.path} is damaged; restore it from a backup, do not start a new one")

    def fresh(self) -> list[str]:
        """The texts added since the last call (all of them at first), checked against the chain."""
        with _explained(self.path):
            joined = self._connection.execute(
                "SELECT h.count, h.chain, e.number, e.body, e.chain FROM head h LEFT JOIN entries e ON e.number > ? "
                "ORDER BY e.number",
                (self._count,),
            ).fetchall()
            count, head = joined[0][:2]
        rows = [row[2:] for row in joined if row[2] is not None]
        chain, number = self._chain, self._count
        for found, body, stored in rows:
            number += 1
            chain = _link(chain, body) if isinstance(body, str) else b""
            if found != number or chain != stored:
                raise LedgerError(
                    f"entry {found} of {self.path} was altered or removed; restore the ledger from a backup"
                )
        if number != count or chain != head:
            raise LedgerError(f"{self.path} lost entries ({number} of {count} found); restore the ledger from a backup")
        self._count, self._chain = self._durable = number, chain
        return [body for _, body, _ in rows]

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the write lock; what was appended inside is durable on a normal exit and gone on any exception."""
        if self._file_identity() != self._identity:
            raise LedgerError(f"{self.path} was moved or replaced while open; put the ledger back and open it again")
        with _explained(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            with _explained(self.path):
                self._connection.execute("COMMIT")
            self._durable = self._count, self._chain
        except BaseException:
            self._count, self._chain = self._durable
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def append(self, body: str) -> None:
        """Add one text; call inside `exclusive()` and after `fresh()`."""
        number, chain = self._count + 1, _link(self._chain, body)
        with _explained(self.path):
            self._connection.execute("INSERT INTO entries VALUES (?, ?, ?)", (number, body, chain))
            self._connection.execute("UPDATE head SET count = ?, chain = ?", (number, chain))
        self._count, self._chain = number, chain

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
