"""Read the columns of a schema from Parquet files of a run directory. An error names the file."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from faultbed.testbed.errors import RecordError

__all__ = ["read"]


def read(path: Path, schema: pa.Schema) -> pa.Table:
    """Return the columns of `schema`, in its order and types, with the file's own metadata.

    Raises:
        RecordError: no such file, not Parquet, cut short, or a column is missing, has another type, or is null where
            the schema requires a value.
    """
    try:
        table = pq.read_table(path)
        chosen = table.select(schema.names).cast(schema.with_metadata(table.schema.metadata))
        chosen.validate(full=True)
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise RecordError(
            f"{path}: cannot be read: {error}; copy the run directory again, or remove the file"
        ) from error
    return chosen
