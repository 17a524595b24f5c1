"""One read-only SQL statement on a database in memory, within bounds of time and memory.

No statement is judged by its text. While SQLite compiles a statement, it calls an authorizer for each operation that
the statement needs (sqlite.org/c3ref/set_authorizer.html); ours allows only reading.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from faultbed.testbed.errors import UsageError

__all__ = ["MAX_BYTES", "MAX_ROWS", "MAX_S", "Answer", "Cell", "ask"]

MAX_S = 60.0
"""Time limit of one statement."""
MAX_ROWS = 100_000
MAX_BYTES = 256 << 20
"""Maximum memory of a statement in addition to the tables, and maximum size of its answer."""
_MAX_CELL_BYTES = 4 << 20
_OPERATIONS = 10_000
"""Number of instructions of SQLite's virtual machine between two checks of the time limit."""
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})

Cell: TypeAlias = "int | float | str | bytes | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The columns and rows of a statement."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]


def columns_read(tables: Mapping[str, str], sql: str) -> dict[str, set[str]]:
    """Return the names of the columns that a statement reads, by table; a table whose rows are only counted has none.

    Args:
        tables: columns of each table, as SQL.
        sql: one statement. One that cannot be compiled behind EXPLAIN, as it has one itself or is wrong, reads all
            columns; `ask` says what is wrong with it. So does one with a NATURAL join or USING: SQLite compares
            columns of these without calling the authorizer.
    """
    reads: dict[str, set[str]] = {}
    is_hidden = any(word in sql.lower() for word in ("natural", "using"))

    def record(action: int, first: str | None, second: str | None, database: str | None, inner: str | None) -> int:
        table = (first or "").lower()  # one whose rows are only counted is reported as the statement spells it
        if action == sqlite3.SQLITE_READ and table in tables:
            reads.setdefault(table, set()).add(second or "")
        return _authorize(action, first, second, database, inner)

    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for table, columns in tables.items():
            connection.execute(f"CREATE TABLE {table} ({columns})")
        _add_aggregates(connection, [])
        connection.set_authorizer(record)
        try:
            connection.execute(f"EXPLAIN {sql}")  # compiles it, and runs nothing
        except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError):
            is_hidden = True
        if is_hidden:
            connection.set_authorizer(None)
            return {
                table: {column[1] for column in connection.execute(f"PRAGMA table_info({table})")} for table in tables
            }
    return reads


def ask(connection: sqlite3.Connection, sql: str, filled: Mapping[str, Collection[str]] | None = None) -> Answer:
    """Run one read-only statement. Nothing can be written over the connection afterwards.

    SQL has the aggregates `median(x)` and `quantile(x, q)` besides SQLite's own. `filled` are the columns that have
    values; None: all. A statement that reads another one is refused, because an empty column would look like an answer.

    Raises:
        UsageError: it is no statement, more than one, wrong, one that would change something, or beyond a bound.
    """
    aggregate_errors: list[str] = []
    deadline = time.monotonic() + MAX_S
    _restrict(connection, deadline, aggregate_errors, filled)
    try:
        cursor = connection.execute(sql)
        if cursor.description is None:
            raise UsageError("query: the SQL returns nothing; give one SELECT")
        columns = tuple(column[0] for column in cursor.description)
        return Answer(columns=columns, rows=_bounded(cursor))
    # Python 3.11 raises sqlite3.Warning for a second statement, later versions ProgrammingError.
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        raise UsageError(f"query: {_reason(error, deadline, aggregate_errors)}") from error


def _add_aggregates(connection: sqlite3.Connection, errors: list[str]) -> None:
    for name, arguments in (("median", 1), ("quantile", 2)):
        connection.create_aggregate(name, arguments, _aggregate(name, errors))


def _restrict(
    connection: sqlite3.Connection,
    deadline: float,
    aggregate_errors: list[str],
    filled: Mapping[str, Collection[str]] | None,
) -> None:
    """Add the aggregates and set the limits. The authorizer is set last, because it also refuses PRAGMA."""
    connection.set_authorizer(None)
    _add_aggregates(connection, aggregate_errors)
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_CELL_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.execute("PRAGMA temp_store = MEMORY")  # a large sort must not fill the disk
    # SQLite does not report the memory that the tables take: assume twice the size of the database's pages.
    (pages,), (page_bytes,) = (connection.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size"))
    connection.execute(f"PRAGMA hard_heap_limit = {2 * pages * page_bytes + MAX_BYTES}")
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _OPERATIONS)

    def authorize(action: int, first: str | None, second: str | None, database: str | None, inner: str | None) -> int:
        # A table whose rows are only counted is reported as the statement spells it.
        table = (first or "").lower()
        if filled is not None and action == sqlite3.SQLITE_READ and table in tables:
            is_filled = table in filled and (not second or second in filled[table])
            return sqlite3.SQLITE_OK if is_filled else sqlite3.SQLITE_DENY
        return _authorize(action, first, second, database, inner)

    connection.set_authorizer(authorize)


def _authorize(action: int, first: str | None, second: str | None, _database: str | None, _inner: str | None) -> int:
    """Allow operations that read the tables, and all functions except the one that loads code (named by `second`)."""
    del first
    if action == sqlite3.SQLITE_FUNCTION and second == "load_extension":
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _bounded(cursor: sqlite3.Cursor) -> list[tuple[Cell, ...]]:
    """Fetch all rows of an answer.

    Raises:
        UsageError: the answer exceeds `MAX_ROWS` or `MAX_BYTES`. It is not cut, because a part looks like a whole.
    """
    rows: list[tuple[Cell, ...]] = []
    count_bytes = 0
    for row in cursor:
        count_bytes += sum(len(cell) if isinstance(cell, str | bytes) else 8 for cell in row)
        if len(rows) == MAX_ROWS or count_bytes > MAX_BYTES:
            raise UsageError(
                f"query: more than {MAX_ROWS:,} rows or {MAX_BYTES >> 20} MiB; count or group them, or add LIMIT"
            )
        rows.append(row)
    return rows


def _reason(error: Exception, deadline: float, aggregate_errors: Sequence[str]) -> str:
    if aggregate_errors:
        return aggregate_errors[0]
    text = str(error)
    if text == "interrupted":
        if time.monotonic() > deadline:
            return f"not done after {MAX_S:g} s; join on columns that are equal, or add WHERE and LIMIT"
        raise KeyboardInterrupt from error  # Ctrl-C while SQLite called the progress handler
    if "not authorized" in text or "prohibited" in text:
        return f"{text}: a query only reads; give one SELECT"
    if isinstance(error, MemoryError) or "out of memory" in text:
        return f"it needs more than {MAX_BYTES >> 20} MiB; add WHERE, or group by fewer values"
    if "one statement" in text:
        return f"{text}; give one SELECT"
    return f"{text}; `faultbed query --help` lists tables and columns"


def _aggregate(name: str, errors: list[str]) -> type[Any]:
    """Return the class that implements the aggregate `median` or `quantile` for SQLite.

    SQLite hides the messages of exceptions in aggregates, so they are appended to `errors`.
    """

    class Quantile:
        """Quantile by linear interpolation between order statistics, as numpy's default (Hyndman and Fan, type 7)."""

        def __init__(self) -> None:
            self.values: list[object] = []
            self.shares: list[object] = []
            # SQLite calls this once a row: a method of ours would take four times as long.
            self.step: Callable[..., None] = self.values.append if name == "median" else self._step

        def _step(self, value: object, share: object) -> None:
            self.values.append(value)
            self.shares[:] = [share]

        def finalize(self) -> float | None:
            values = sorted(map(self._number, (value for value in self.values if value is not None)))
            (share,) = self.shares or [0.5]
            if not isinstance(share, int | float) or not 0 <= share <= 1:
                self._fail(f"{name}(): {share!r} is no share from 0 to 1")
            if not values:
                return None
            at = float(share) * (len(values) - 1)  # type: ignore[arg-type]
            low, high = values[int(at)], values[min(int(at) + 1, len(values) - 1)]
            return low if low == high else low + (high - low) * (at - int(at))

        def _number(self, value: object) -> float:
            if not isinstance(value, int | float):
                self._fail(f"{name}(): {value!r} is no number; add WHERE typeof(x) IN ('integer', 'real')")
            return float(value)  # type: ignore[arg-type]

        @staticmethod
        def _fail(message: str) -> None:
            errors.append(message)
            raise ValueError(message)

    return Quantile
