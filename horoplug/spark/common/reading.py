"""Intermediate data as batches of NumPy arrays, for one rank.

A pass puts the row groups of all files into an order, which is the same on all ranks, and a rank reads its share of the
rows: as many as any other rank has, by repeating the first rows at the end. Then it shuffles rows in a buffer. A row
group at the border of two shares is read by two ranks. Threads read row groups ahead of their use."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from horoplug.spark.common.columns import SCALAR, Column
from horoplug.spark.common.errors import EstimatorError, first_line, needed
from horoplug.spark.common.store import Store

Block = Mapping[str, "np.ndarray[Any, Any]"]
"""Rows: an array with one row per row for each column."""

DEFAULT_BUFFER: Final = 100_000  # rows


def rows_in(block: Block) -> int:
    return len(next(iter(block.values())))


class RowGroups:
    """The row groups of a Parquet data set, in the order of the files' names.

    ``transform``: a function from a pandas DataFrame with the rows of a row group to one with as many rows."""

    def __init__(
        self,
        store: Store,
        path: str,
        columns: Sequence[Column],
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        data = store.get_parquet_dataset(path)
        files = sorted(data.get_fragments(), key=lambda fragment: fragment.path)
        self._parts = [part for file in files for part in file.split_by_row_group()]
        self._columns = columns
        self._transform = transform
        self.rows = [part.row_groups[0].num_rows for part in self._parts]

    def read(self, number: int) -> Block:
        """The rows of one row group. Raises EstimatorError for nulls and irregular arrays."""
        table = self._parts[number].to_table(columns=[column.name for column in self._columns])
        block = {c.name: to_numpy(table.column(c.name), c) for c in self._columns}
        return block if self._transform is None else self._transformed(block)

    def _transformed(self, block: Block) -> Block:
        assert self._transform is not None
        pandas = needed("pandas")
        cells = {name: array if array.ndim == 1 else list(array) for name, array in block.items()}
        frame = self._transform(pandas.DataFrame(cells))
        if not isinstance(frame, pandas.DataFrame) or len(frame) != rows_in(block):
            raise EstimatorError(
                f"transformation_fn must return a pandas.DataFrame with the {rows_in(block)} rows that it gets"
            )
        lost = [name for name in block if name not in frame.columns]
        if lost:
            raise EstimatorError(f"transformation_fn has removed the column {lost[0]!r}")
        return {name: stacked(frame[name], name) for name in block}


def stacked(series: Any, name: str) -> np.ndarray[Any, Any]:
    """A pandas Series of numbers or of arrays as one array. Raises EstimatorError."""
    nulls = int(series.isna().sum()) if series.dtype == object else 0
    if nulls:
        raise EstimatorError(f"column {name!r} has nulls in {nulls} of {len(series)} rows")
    values = series.to_numpy()
    if values.dtype != object:
        return np.asarray(values)
    try:
        return np.stack([np.asarray(value) for value in values])
    except ValueError as error:
        raise EstimatorError(f"column {name!r}: {first_line(error)}") from error


def to_numpy(values: Any, column: Column) -> np.ndarray[Any, Any]:
    """A chunked array of Arrow as an array of NumPy. Raises EstimatorError for nulls and irregular arrays."""
    array = values.combine_chunks() if values.num_chunks != 1 else values.chunk(0)
    if array.null_count:
        raise EstimatorError(
            f"column {column.name!r} has nulls in {array.null_count} of {len(array)} rows"
        )
    if column.kind == SCALAR:
        return np.asarray(array.to_numpy(zero_copy_only=False))
    flat = array.flatten()
    if flat.null_count:
        raise EstimatorError(f"column {column.name!r} has arrays with nulls")
    lengths = array.value_lengths().to_numpy(zero_copy_only=False)
    if (lengths != column.size).any():
        raise EstimatorError(
            f"column {column.name!r} has arrays of {lengths.min()} to {lengths.max()} elements; the first row has "
            f"{column.size}"
        )
    return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(array), column.size)


class Reader:
    """Batches of one rank.

    rank, size: the number of this rank, and how many there are.
    even: give each rank as many rows as the others, by repeating rows. Otherwise shares differ by one row at most, and
        each row is in exactly one.
    shuffle: new orders of row groups and rows in each pass, which ``seed`` decides.
    buffer: rows among which rows are shuffled.
    workers: threads that read ahead; 0: none.
    cache: keep the share of the first pass in memory, and do not read again."""

    def __init__(
        self,
        groups: RowGroups,
        rank: int,
        size: int,
        batch_size: int,
        *,
        even: bool = True,
        shuffle: bool = True,
        seed: int | None = None,
        buffer: int | None = None,
        workers: int = 1,
        cache: bool = False,
    ) -> None:
        total: int = sum(groups.rows)
        self._groups = groups
        self._rank = rank
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed or 0
        self._buffer = buffer or DEFAULT_BUFFER
        self._workers = workers
        self._cached: list[Block] | None = None
        self.rows: int
        self._cache = cache
        if even:
            self.rows = -(-total // size)
            self._start = rank * self.rows
        else:
            self.rows = total // size + int(rank < total % size)
            self._start = rank * (total // size) + min(rank, total % size)

    @property
    def steps(self) -> int:
        """Batches in a pass. The last one may be smaller than the others."""
        return -(self.rows // -self._batch_size)

    def one_pass(self, number: int = 0) -> Iterator[Block]:
        """The batches of a pass; ``number`` chooses the order, when rows are shuffled."""
        blocks = self._blocks(number)
        if self._shuffle:
            random = np.random.default_rng([self._seed, number, self._rank])
            blocks = shuffled(blocks, self._buffer, random)
        return batched(blocks, self._batch_size)

    def stream(self, first: int = 0) -> Iterator[Block]:
        """The batches of one pass after another, without end."""
        for number in itertools.count(first):
            yield from self.one_pass(number)

    def shares(self, number: int) -> Iterator[tuple[int, int, int]]:
        """The parts of row groups that this rank reads in a pass: (row group, first row, end)."""
        order = np.arange(len(self._groups.rows))
        if self._shuffle and not self._cache:
            np.random.default_rng([self._seed, number]).shuffle(order)
        skip, left = self._start, self.rows
        total = sum(self._groups.rows)
        skip %= total
        for group in itertools.cycle(order.tolist()):
            if not left:
                return
            rows = self._groups.rows[group]
            begin, skip = min(skip, rows), max(0, skip - rows)
            end = min(rows, begin + left)
            if end > begin:
                yield group, begin, end
                left -= end - begin

    def _blocks(self, number: int) -> Iterator[Block]:
        if not self._cache:
            return self._read(number)
        if self._cached is None:
            self._cached = list(self._read(number))
        return iter(self._cached)

    def _read(self, number: int) -> Iterator[Block]:
        def load(share: tuple[int, int, int]) -> Block:
            group, begin, end = share
            block = self._groups.read(group)
            return {name: array[begin:end] for name, array in block.items()}

        return ahead(load, self.shares(number), self._workers)


def ahead(
    function: Callable[[Any], Block], arguments: Iterable[Any], workers: int
) -> Iterator[Block]:
    """``map`` with threads that are as many results ahead as there are threads."""
    if not workers:
        yield from map(function, arguments)
        return
    waiting: collections.deque[concurrent.futures.Future[Block]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(workers, "horoplug-reader") as pool:
        try:
            for argument in arguments:
                waiting.append(pool.submit(function, argument))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def shuffled(blocks: Iterable[Block], buffer: int, random: np.random.Generator) -> Iterator[Block]:
    """Shuffle rows among at least ``buffer`` rows: a full buffer is shuffled and its first half is used."""
    held: list[Block] = []
    number = 0
    for block in blocks:
        held.append(block)
        number += rows_in(block)
        if number >= buffer:
            mixed = _permuted(held, random)
            used = max(number - buffer // 2, 1)
            yield {name: array[:used] for name, array in mixed.items()}
            held, number = [{name: array[used:] for name, array in mixed.items()}], number - used
    if number:
        yield _permuted(held, random)


def _permuted(blocks: Sequence[Block], random: np.random.Generator) -> Block:
    joined = joined_blocks(blocks)
    order = random.permutation(rows_in(joined))
    return {name: array[order] for name, array in joined.items()}


def joined_blocks(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def batched(blocks: Iterable[Block], size: int) -> Iterator[Block]:
    """The same rows in blocks of ``size`` rows; the last one may be smaller."""
    held: list[Block] = []
    number = 0
    for block in blocks:
        held.append(block)
        number += rows_in(block)
        if number < size:
            continue
        joined = joined_blocks(held)
        end = number - number % size
        for begin in range(0, end, size):
            yield {name: array[begin : begin + size] for name, array in joined.items()}
        number -= end
        held = [{name: array[end:] for name, array in joined.items()}] if number else []
    if number:
        yield joined_blocks(held)
