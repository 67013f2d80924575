"""Rows of parquet files by number: small files in memory, large ones memory-mapped, never more than is looked at.

Parquet cannot be read at a random row without decoding everything around it. A large file is therefore converted once
to Arrow's own format in the cache folder (`SOLORL_CACHE`, else ~/.cache/solorl) and mapped from there, which costs no
time and no memory of its own. The first process to ask converts; the others wait for its file.
"""

import fcntl
import glob
import hashlib
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from common.launch import UserError

MAPPED_ROWS = 50_000
"""Files with more rows than this are read through a memory-mapped copy."""
CONVERT_ROWS = 16_384
"""Rows that are in memory at a time while a file is converted."""
RELEASE_EVERY = 200
"""Reads of single rows after which the mapped pages are let go of."""
CACHE_FORMAT = 1
"""Changes when the cached files would look different."""


# -- files ------------------------------------------------------------------------------------------------------------


def expand_files(files: Sequence[str]) -> list[Path]:
    """The parquet files behind paths, folders and globs, each once, in the order given (a folder's by name).

    Raises:
        UserError: something named does not exist, or a folder mixes the files of several splits.
    """
    paths: list[Path] = []
    for name in files:
        path = Path(name).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*.parquet") if not p.name.startswith("."))
            if not found:
                raise UserError(f"{name}: no .parquet file in this folder")
            _refuse_mixed_splits(name, found)
        elif path.is_file():
            found = [path]
        else:
            found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
            if not found:
                raise UserError(f"{name}: no such file or folder, and no file matches it as a pattern")
        paths.extend(found)
    if not paths:
        raise UserError("no data files given")
    unique: dict[Path, Path] = {}
    for path in paths:
        unique.setdefault(path.resolve(), path)
    return list(unique.values())


def _refuse_mixed_splits(folder: str, paths: Sequence[Path]) -> None:
    """A folder that holds train.parquet beside test.parquet would silently train on the test set."""
    splits: dict[str, str] = {}
    for path in paths:
        word = re.match(r"(train|test|valid|val|dev|eval)", path.name)
        if word:
            splits.setdefault(word[1], path.name)
    if len(splits) > 1:
        raise UserError(f"{folder}: holds the files of several splits ({', '.join(splits.values())}); name the files")


def check_files(files: Sequence[str], columns: Sequence[str]) -> list[Path]:
    """Check that the files exist, are parquet and have the columns, reading nothing but their footers.

    Returns the files. A file without rows may lack columns: its writer could not know the types of nothing.

    Raises:
        UserError: naming the file and the column.
    """
    paths = expand_files(files)
    for path in paths:
        metadata, names = footer(path)
        missing = [column for column in columns if column not in names]
        if missing and metadata.num_rows > 0:
            raise UserError(
                f"{path}, row 0: no column '{missing[0]}' in this row or any other; there are: "
                f"{', '.join(names) or 'none'}. Needed: {', '.join(columns)} (docs/data.md)"
            )
    return paths


def footer(path: Path) -> tuple[pq.FileMetaData, list[str]]:
    """The metadata of a parquet file and the names of its top-level columns."""
    try:
        with pq.ParquetFile(path) as file:
            return file.metadata, file.schema_arrow.names
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: not a parquet file that can be read ({reason})") from error


# -- rows -------------------------------------------------------------------------------------------------------------


class Rows:
    """The rows of several parquet files, each file read with its own types, addressed by one running index.

    Files are never joined into one table: `ground_truth` may be a string in one file and a struct in the next.
    Columns that are asked for and absent are absent from the rows too.
    """

    def __init__(self, paths: Sequence[Path], columns: Sequence[str]) -> None:
        self.paths = list(paths)
        opened = [_open_table(path, columns) for path in paths]
        self.tables = [table for table, _ in opened]
        self._mappings = [mapping for _, mapping in opened if mapping is not None]
        self._reads = 0
        self.starts = np.cumsum([0] + [table.num_rows for table in self.tables])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """(number of the file, row in that file) of a running index."""
        which = int(np.searchsorted(self.starts, index, side="right")) - 1
        return which, index - int(self.starts[which])

    def __getitem__(self, index: int) -> dict[str, Any]:
        which, row = self.locate(index)
        self._reads += 1
        if self._reads % RELEASE_EVERY == 0:
            self._release()
        return self.tables[which].slice(row, 1).to_pylist(maps_as_pydicts="lossy")[0]

    def column(self, name: str, indices: np.ndarray) -> list[Any]:
        """The values of one column at ascending running indices; many at once cost far less than one by one."""
        values = []
        for start, end, table in zip(self.starts, self.starts[1:], self.tables, strict=False):
            inside = indices[(indices >= start) & (indices < end)] - start
            if len(inside):
                values += table.select([name]).take(pa.array(inside))[name].to_pylist(maps_as_pydicts="lossy")
        return values

    def columns_at(self, index: int) -> list[str]:
        """The columns that the file of a running index has, of those asked for."""
        return self.tables[self.locate(index)[0]].schema.names

    def name(self, index: int) -> str:
        """`file, row n`, for messages."""
        which, row = self.locate(index)
        return f"{self.paths[which]}, row {row}"

    def batches(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """(running index of its first row, batch) over all files, without copying."""
        for start, table in zip(self.starts, self.tables, strict=False):
            position = int(start)
            for batch in table.to_batches(max_chunksize=CONVERT_ROWS):
                yield position, batch
                position += batch.num_rows
                self._release()

    def _release(self) -> None:
        """Let go of the mapped pages that were read: they stay in the system's cache, but no longer count as ours."""
        for mapping in self._mappings:
            mapping.madvise(mmap.MADV_DONTNEED)

    def refuse_nulls(self, column: str) -> None:
        """Every row must have a value in this column.

        Raises:
            UserError: naming the file, the row and the column.
        """
        for start, batch in self.batches():
            if column in batch.schema.names and batch[column].null_count:
                row = int(np.flatnonzero(batch[column].is_null().to_numpy(zero_copy_only=False))[0])
                raise UserError(f"{self.name(start + row)}: '{column}' is empty (null)")

    def fingerprint(self) -> str:
        """Changes when the files do, or their order."""
        return _digest(*(_file_key(path) for path in self.paths))


def _open_table(path: Path, columns: Sequence[str]) -> tuple[pa.Table, mmap.mmap | None]:
    """(the columns of a file that it has, the mapping that they lie in or None when they are in memory).

    Raises:
        UserError: the file is damaged behind its footer.
    """
    try:
        # The buffer makes it read column chunks piece by piece instead of whole.
        with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
            present = [column for column in columns if column in file.schema_arrow.names]
            if file.metadata.num_rows <= MAPPED_ROWS:
                return _plain(file.read(columns=present)), None
            key = _digest(_file_key(path), *present)
            mapped = cached(f"{path.stem}-{key}.arrow", lambda target: _convert(file, present, target))
        with mapped.open("rb") as cached_file:
            mapping = mmap.mmap(cached_file.fileno(), 0, prot=mmap.PROT_READ)
        return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapping))).read_all(), mapping
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged ({' '.join(str(error).split())[:120]})") from error


def _plain(data: pa.Table) -> pa.Table:
    """Dictionary-encoded columns (pandas categories) as their values."""
    for number, name in enumerate(data.schema.names):
        if pa.types.is_dictionary(data.schema.field(name).type):
            data = data.set_column(number, name, data[name].cast(data.schema.field(name).type.value_type))
    return data


def _convert(file: pq.ParquetFile, columns: Sequence[str], target: Path) -> None:
    """Write the columns in Arrow's IPC format, a few thousand rows at a time."""
    writer = None
    for batch in file.iter_batches(batch_size=CONVERT_ROWS, columns=list(columns), use_threads=False):
        table = _plain(pa.Table.from_batches([batch]))
        if writer is None:
            writer = pa.ipc.new_file(str(target), table.schema)
        writer.write_table(table)
    writer.close()
    pa.default_memory_pool().release_unused()


# -- cache ------------------------------------------------------------------------------------------------------------


def _file_key(path: Path) -> str:
    status = path.stat()
    return f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join((str(CACHE_FORMAT), *parts)).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """`SOLORL_CACHE`, else ~/.cache/solorl, else (a read-only home) a folder under the system's temporary one."""
    candidates = [os.environ.get("SOLORL_CACHE"), "~/.cache/solorl", f"{tempfile.gettempdir()}/solorl-{os.getuid()}"]
    for candidate in filter(None, candidates):
        folder = Path(candidate).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise UserError(f"no folder to cache data in can be written: {candidates}; set SOLORL_CACHE to one")


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The cached file of this name, made by `make(path)` if it is not there: complete or absent, by one process."""
    target = cache_folder() / name
    if target.exists():
        return target
    with _locked(target.with_name(f"{target.name}.lock")):
        if not target.exists():
            unfinished = target.with_name(f"{target.name}.tmp")
            try:
                make(unfinished)
            except OSError as error:
                raise UserError(f"cannot write {unfinished} ({error}); set SOLORL_CACHE to another folder") from error
            os.replace(unfinished, target)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the kernel frees it when a holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
