"""The durable file under a ledger: SQLite as append-only lists of texts that survive kill -9 and power loss.

Why journal_mode=DELETE with synchronous=EXTRA: in DELETE mode a commit *is* the removal of the journal, and only EXTRA
syncs the folder afterwards. With FULL, a power cut could bring the journal back and undo a commit: the ledger would
then count less than was sent. WAL with FULL is as durable, but a copy of the main file alone would lack the last
rounds, and nobody would notice.

A file holds the list of one client (a ledger) or the lists of many (a register). SHA-256 chains every text to the one
before, and the head of each chain is stored beside them. That detects damage and careless edits (a line changed,
removed or cut off). It does not detect an owner who rewrites the whole chain or restores an old copy.
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
from typing import NamedTuple

from bqsgd._src.errors import LedgerError, NotWritten, UnsafeFile
from bqsgd._src.storage import closed_on_error, draft, open_regular

APPLICATION_ID = 0x62715347
BUSY_SECONDS = 60.0
"""How long to wait for another process that is writing the file."""
MAX_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Form:
    """The SQL of one kind of file. `clients` is the query for the number of rows that `heads` must return."""

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


class ChainEnd(NamedTuple):
    """The last text of one client's list that is known: how many there are up to it, and its hash in the chain."""

    number: int
    chain: bytes

    @classmethod
    def of_empty_list(cls, client: int) -> ChainEnd:
        """Where the list of this client begins. The client is part of the chain, so lists cannot be exchanged."""
        return cls(0, hashlib.sha256(f"bqsgd.ledger.v1 client {client}".encode()).digest())

    def after(self, body: str) -> ChainEnd:
        """The end of the list once `body` is added to it."""
        return ChainEnd(self.number + 1, hashlib.sha256(self.chain + body.encode()).digest())


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into a LedgerError that says what to do."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise LedgerError(
            f"ledger {path} could not be used ({error}) and nothing was recorded. Check that the disk is not full, "
            f"that the folder is writable and that no other process holds the file for more than {BUSY_SECONDS:.0f} s"
        ) from error
    except (sqlite3.DatabaseError, UnicodeDecodeError, TypeError, IndexError) as error:
        # All of these mean a damaged file: UnicodeDecodeError if SQLite's message quotes bytes of it, TypeError and
        # IndexError if a query that must return a row returns none.
        raise LedgerError(
            f"{path} is not a readable ledger ({error}); restore it from a backup, do not start a new one"
        ) from error


def create_file(path: Path, form: Form, first_bodies: Mapping[int, str]) -> None:
    """Make a ledger or register of these clients, each with its first entry. Does nothing if the file exists.

    The file is written under another name and renamed into place. So a half-made file never has the ledger's name, and
    an empty file under that name is always damage, never a ledger that was being made.

    Raises:
        LedgerError: the folder is not writable, or the disk is full.
    """
    try:
        with draft(path) as (_, name):
            # Only now that the draft is locked: another process may have made the ledger while this one waited, and a
            # new one in its place would have a fresh budget.
            if path.exists():
                return
            # A journal that a killed process left here must not be applied to the new draft.
            Path(f"{name}-journal").unlink(missing_ok=True)
            with _explained(path), contextlib.closing(_connect(name, mode="rw")) as connection:
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {form.format}")
                connection.execute("BEGIN IMMEDIATE")
                for statement in form.schema:
                    connection.execute(statement)
                if form is REGISTER:
                    connection.execute("INSERT INTO register VALUES (1, ?)", (len(first_bodies),))
                for client, body in first_bodies.items():
                    number, chain = ChainEnd.of_empty_list(client).after(body)
                    row = {"client": client, "number": number, "body": body, "chain": chain}
                    connection.execute(form.add, row)
                    connection.execute(form.add_head, row)
                connection.execute("COMMIT")
            os.rename(name, path)
    except (NotWritten, UnsafeFile) as error:
        raise LedgerError(f"ledger {path} could not be made ({error}); choose a path in a writable folder") from error


def _connect(path: Path, *, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,  # LedgerFile.lock keeps threads apart
    )
    with closed_on_error(connection):
        for pragma in ("trusted_schema = OFF", "synchronous = EXTRA", "fullfsync = ON"):
            connection.execute(f"PRAGMA {pragma}")
        if mode != "ro":
            connection.execute("PRAGMA journal_mode = DELETE")
    return connection


class LedgerFile:
    """An open ledger or register: the clients in it, and the one transaction that may be open.

    lock: a thread holds it while it uses the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.RLock()
        self.broken = False
        """Whether a `together` block failed. Its ledgers may then count entries that are not in the file, so the file
        refuses all further writes."""
        self._writing, self._pid = False, os.getpid()
        try:
            file = open_regular(path, limit=MAX_BYTES)
        except UnsafeFile as error:
            raise LedgerError(f"not a ledger: {error}") from error
        if file is None:
            raise LedgerError(f"no ledger at {path}; if this client has spent before, restore the file from a backup")
        with file:
            if not file.read(1):
                raise LedgerError(
                    f"{path} is empty, which a ledger never is; restore it from a backup, do not start a new one"
                )
        # Read-write even for reading, if allowed: the first reader after a crash must roll the journal back.
        mode = "rw" if os.access(path, os.W_OK) else "ro"
        with _explained(path), closed_on_error(_connect(path, mode=mode)) as self.connection:
            self.form = self._checked_form()
            self.clients = self._read_clients()
        self._identity = self._file_identity()

    @property
    def opened_here(self) -> bool:
        """Whether this process opened the file; false in a forked child."""
        return os.getpid() == self._pid

    @property
    def is_register(self) -> bool:
        """Whether the file holds the ledgers of many clients."""
        return self.form is REGISTER

    def check_process(self) -> None:
        """Raise LedgerError in a forked child: the SQLite connection and the reserved rounds belong to the parent."""
        if not self.opened_here:
            raise LedgerError("a ledger does not survive a fork; open it again in the new process")

    def check_client(self, client: int) -> None:
        """Raise LedgerError if the file holds no ledger of this client."""
        if client not in self.clients:
            whose = f"{len(self.clients)} other clients" if self.is_register else f"client {self.clients[0]}"
            raise LedgerError(
                f"{self.path} holds no ledger of client {client}, but of {whose}; give the path of the client's file"
            )

    def _file_identity(self) -> tuple[int, int] | None:
        try:
            state = self.path.stat()
        except FileNotFoundError:
            return None
        return state.st_dev, state.st_ino

    def _checked_form(self) -> Form:
        query = self.connection.execute
        if query("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise LedgerError(f"{self.path} is an SQLite file but not a bqsgd ledger; give the path of the ledger")
        version = query("PRAGMA user_version").fetchone()[0]
        if version not in _FORMS:
            known = " and ".join(map(str, _FORMS))
            raise LedgerError(
                f"{self.path} has ledger format {version}, but this version of bqsgd reads {known}; use another version"
            )
        form = _FORMS[version]
        if {row[0] for row in query("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")} != set(form.schema):
            raise LedgerError(
                f"{self.path} was changed by another program (unknown tables or triggers); restore it from a backup"
            )
        if query("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise LedgerError(f"{self.path} is damaged; restore it from a backup, do not start a new one")
        return form

    def _read_clients(self) -> tuple[int, ...]:
        clients = [row[0] for row in self.connection.execute(self.form.heads).fetchall()]
        expected = self.connection.execute(self.form.clients).fetchall()
        if len(expected) != 1 or len(clients) != expected[0][0] or not clients:
            raise LedgerError(f"{self.path} is damaged; restore it from a backup, do not start a new one")
        for client in clients:
            if not isinstance(client, int):  # SQLite keeps any type in any column
                raise LedgerError(f"{self.path} is damaged (it names client {client!r}); restore it from a backup")
        return tuple(clients)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the write lock. What is written in the block is durable when it ends, and undone if it raises.

        A block inside a `together` block joins its transaction, and is durable only when that one ends.
        """
        with self.lock:
            self.check_process()
            if self.broken:
                raise LedgerError(f"{self.path}: a write to it failed; open it again")
            if self._writing:
                yield
                return
            # A write to a file that has lost its name would be durable and never be read again.
            if self._file_identity() != self._identity:
                raise LedgerError(
                    f"{self.path} was moved or replaced while open; put the ledger back and open it again"
                )
            # IMMEDIATE takes the write lock now: what is read in the block is then still true when it is written.
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
        """Record everything in the block in one durable write. If the block raises, the file must be opened again."""
        try:
            with self.exclusive():
                yield
        except BaseException:
            self.broken = True
            raise

    def read_after(self, client: int, end: ChainEnd) -> tuple[list[str], ChainEnd]:
        """The texts of a client's list after `end`, checked against the chain, and the new end of the list."""
        self.check_process()
        with _explained(self.path):
            rows = self.connection.execute(self.form.read, {"client": client, "after": end.number}).fetchall()
            head = rows[0][:2]
        bodies = []
        # Without new entries the join has one row, with nothing but the head.
        for _, _, stored_number, body, stored_chain in rows if rows[0][2] is not None else ():
            number = end.number + 1
            end = end.after(body) if isinstance(body, str) else end  # SQLite keeps any type in any column
            if end != (stored_number, stored_chain):
                raise LedgerError(
                    f"entry {number} of {self.path} was altered or removed; restore the ledger from a backup"
                )
            bodies.append(body)
        # The entries cannot show that the last ones were cut off; the head can.
        if end != head:
            raise LedgerError(
                f"{self.path} lost entries ({end.number} of {head[0]} are left); restore the ledger from a backup"
            )
        return bodies, end

    def append(self, client: int, end: ChainEnd, bodies: list[str]) -> ChainEnd:
        """Add texts to a client's list, which ends at `end`; call it inside `exclusive`. Returns the new end."""
        with _explained(self.path):
            for body in bodies:
                end = end.after(body)
                row = {"client": client, "number": end.number, "body": body, "chain": end.chain}
                self.connection.execute(self.form.add, row)
                self.connection.execute(self.form.move_head, row)
        return end

    def close(self) -> None:
        """Close the file."""
        self.connection.close()
