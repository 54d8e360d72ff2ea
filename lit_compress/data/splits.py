"""The splits of a task: read, drawn and encoded, each once."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Self

from lightning.pytorch import LightningDataModule

from lit_compress.data.batching import VALIDATION_SEED, drawn_order, held_out
from lit_compress.data.checks import lists_in
from lit_compress.data.encode import encode, encoding_key
from lit_compress.data.facts import data_facts
from lit_compress.data.sources import ALL, load_split_files
from lit_compress.data.targets import add_targets
from lit_compress.models.backbones import load_tokenizer
from lit_compress.tasks import task_type
from lit_compress.utils.cache import short_hash
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from lit_compress.data.readers import Place
    from lit_compress.tasks.records import Task

HELD_OUT = "held_out"  # the split that data.hold_out makes


@dataclass(frozen=True)
class Split:
    """A split after tokenisation."""

    rows: Dataset  # that are used, as they were read
    encoded: Dataset  # the same as token ids
    key: str  # hash of both
    available: int  # rows before some were drawn


class Splits(LightningDataModule):
    """The part of the DataModule that reads and encodes splits; the settings are the DataModule's."""

    record: Task
    place: Place
    teacher: str | None
    backbone: str
    train_examples: int | None
    validation_examples: int | None
    hold_out: int | None
    batch_size: int
    eval_batch_size: int
    seed: int
    reads_labels: bool
    predicted: str

    def __init__(self) -> None:
        super().__init__()
        # (name, must have labels) -> split; None: a second validation split that does not exist
        self._splits: dict[tuple[str, bool], Split | None] = {}
        self.accumulate = self.devices = 1  # micro-batches of an optimizer step, and processes without a Trainer

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The backbone's tokenizer."""
        tokenizer = load_tokenizer(self.backbone, self.record)
        if line := task_type(self.record).reads_otherwise(self.record, tokenizer):
            note(line)
        return tokenizer

    @property
    def max_length(self) -> int:
        """Longest input in tokens; longer ones are truncated."""
        raise NotImplementedError

    def read_by(self, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return the same data as another tokenizer reads it; the splits are tokenised when they are asked for."""
        other = copy.copy(self)
        other.tokenizer, other._splits, other.predicted = tokenizer, {}, ""
        return other

    def _read(self, names: list[str], labelled: bool) -> None:
        """Load and encode the splits ``names`` that have not been read yet."""
        names = [name for name in names if (name, labelled) not in self._splits]
        if not names:
            return
        max_length = self.max_length  # checked before anything is read
        optional = () if self.reads_labels else ("train",)
        loaded = load_split_files(self.record, self.place, names, labelled, optional)
        for name in names:
            rows = loaded.get(name)
            if rows is None:
                self._splits[name, labelled] = None
                continue
            if name == "train" and self.hold_out is not None:
                kept, held = held_out(
                    len(rows), self.hold_out, self.seed, task_type(self.record).one_text, lists_in(self.record, rows)
                )
                self._splits[HELD_OUT, labelled] = self._encoded(HELD_OUT, rows.select(held), max_length)
                rows = rows.select(kept)
            self._splits[name, labelled] = self._encoded(name, rows, max_length, labelled and name not in optional)

    def _encoded(self, name: str, rows: Dataset, max_length: int, labelled: bool = True) -> Split:
        """Return a split of ``rows``, or of some of them, if the user limits their number.

        Texts that are to get a teacher's vectors get these as labels, if they need any.
        """
        one_text, available = task_type(self.record).one_text, len(rows)
        rows = rows if one_text else self._limited(name, rows)
        key = encoding_key(rows, self.tokenizer, self.record, max_length)
        encoded = encode(rows, self.tokenizer, self.record, max_length)
        if one_text and len(some := self._limited(name, encoded)) < len(encoded):
            encoded, key = some, short_hash(key, len(some))
        if cut := int(encoded.with_format("numpy")["truncated"][:].sum()):
            longest = f"data.max_length {max_length} (in tokens)"
            note(f"{self.record.name} {name}: {cut} of {len(encoded)} inputs are longer than {longest} and are cut")
        if self.record.wants_vectors and self.teacher is not None and labelled:
            encoded, key = add_targets(rows, encoded, key, self.teacher, self.record, max_length, self.eval_batch_size)
        return Split(rows, encoded, key, available)

    def facts(self) -> dict[str, Any]:
        """Return the facts of the data of fit: rows, classes, lengths, repeated rows."""
        splits = self._of_fit().items()
        encoded = {name: (split.rows, split.encoded, split.available) for name, split in splits}
        return data_facts(self.record, encoded, self.max_length)

    def _of_fit(self) -> dict[str, Split]:
        """Return the splits of fit by name; a second validation split may not exist."""
        self.setup("fit")
        names = ["train", *self.record.validation, *([HELD_OUT] if self.hold_out is not None else [])]
        return {name: split for name in names if (split := self._splits[name, True]) is not None}

    def train_tokens(self) -> Dataset:
        """Return the training examples as token ids."""
        return self._of_fit()["train"].encoded

    def train_size(self) -> int:
        """Return the number of training examples."""
        return len(self.train_tokens())

    @property
    def split(self) -> list[int]:
        """How an optimizer step is divided: rows of a micro-batch, micro-batches of a process, processes."""
        return [self.batch_size, self.accumulate, self.trainer.world_size if self.trainer else self.devices]

    @property
    def global_batch(self) -> int:
        """Number of training examples of an optimizer step."""
        return prod(self.split)

    def steps_per_epoch(self) -> int:
        """Return the number of optimizer steps of an epoch."""
        return ceil(self.train_size() / self.global_batch)

    def _split(self, name: str, labelled: bool = True) -> Split:
        """Return a split that :meth:`setup` has read."""
        split = self._splits[name, labelled]
        assert split is not None
        return split

    def _texts_of(self, path: str) -> Split:
        """Return all rows of a file as a split without labels."""
        data = copy.copy(self)
        data.record = task_type(self.record).of_texts(self.record)
        try:
            rows = load_split_files(data.record, replace(self.place, path=path), [ALL], False)[ALL]
        except UserError as error:
            raise UserError(str(error).replace("data.path", "--distil_texts")) from error
        return data._encoded(ALL, rows, self.max_length, labelled=False)

    def _limited(self, name: str, rows: Dataset) -> Dataset:
        """Return the examples of a split, drawn if the user limits their number."""
        option, limit, seed = "data.train_examples", self.train_examples, self.seed
        if name != "train":
            option, limit, seed = "data.validation_examples", self.validation_examples, VALIDATION_SEED
        if limit is None or name not in ("train", *self.record.validation):
            return rows
        drawn = self._drawn(rows, limit, option, seed)
        note(f"{option}: {limit} of {len(rows)} {name} rows are read")
        return drawn

    def _drawn(self, rows: Dataset, number: int, option: str, seed: int | None) -> Dataset:
        """Return ``number`` drawn rows in their order; with the same seed a smaller draw is part of a larger one."""
        if number > len(rows):
            raise UserError(f"{option}: {number} is more than there are; the largest is {len(rows)}")
        return rows.select(sorted(self._order(rows, seed)[:number]))

    def _order(self, rows: Dataset, seed: int | None) -> list[int]:
        """Return the order in which rows are drawn; None: by the data's own seed."""
        return drawn_order(len(rows), self.seed if seed is None else seed, lists_in(self.record, rows))
