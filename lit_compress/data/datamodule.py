"""The DataModule of all tasks: splits are read, drawn and encoded, each once; batches whose order can be resumed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, Self

import torch

from lit_compress.data.batching import (
    VALIDATION_SEED,
    BatchOrder,
    PaddedBatches,
    ResumableLoader,
    drawn_order,
    held_out,
    row_lengths,
)
from lit_compress.data.checks import lists_in
from lit_compress.data.encode import add_targets, content_key, encode, encoding_key, vectors_of, with_vectors
from lit_compress.data.facts import data_facts
from lit_compress.data.settings import DataSettings
from lit_compress.data.sources import ALL, divided, load_split_files, sources_at
from lit_compress.tasks import task_type
from lit_compress.tasks.base import KIND
from lit_compress.utils.cache import short_hash
from lit_compress.utils.devices import pins_memory
from lit_compress.utils.errors import UserError
from lit_compress.utils.progress import note
from lit_compress.utils.types import Dataset, Tokenizer

HELD_OUT = "held_out"  # the split that data.hold_out makes


@dataclass(frozen=True)
class Split:
    """A split after tokenisation."""

    rows: Dataset  # that are used, as they were read
    encoded: Dataset  # the same as token ids
    key: str  # hash of both
    available: int  # rows before some were drawn


class DataModule(DataSettings):
    """Read a task's data, tokenise it once, and make batches of texts of similar length.

    The settings are in :class:`~lit_compress.data.settings.DataSettings`.
    """

    def read_by(self, tokenizer: Tokenizer) -> Self:
        """Return the same data as another tokenizer reads it; the splits are tokenised when they are asked for."""
        other = copy.copy(self)
        other.tokenizer, other._splits, other.predicted = tokenizer, {}, ""
        return other

    def prepare_data(self) -> None:
        """Download and tokenise; Lightning calls this on one process per node, before ``setup`` on all."""
        self.setup(str(self.trainer.state.fn.value) if self.trainer and self.trainer.state.fn else "fit")

    def setup(self, stage: str | None = None) -> None:
        """Read the splits of ``stage`` (fit, validate, test or predict) that have not been read yet.

        Raises:
            UserError: the data, the backbone or a setting is not usable.
        """
        validation = list(self.record.validation)
        if stage in ("fit", None):
            self._read(["train", *validation], labelled=True)
        elif stage == "validate":
            self._read(validation, labelled=True)
        elif stage == "test":
            self._read(["test"], labelled=True)
        elif not self.predicted:
            there = sources_at(self.record, self.place, [ALL, "test"])
            self.predicted = next((split for split in (ALL, "test") if split in there), validation[0])
            self._read([self.predicted], labelled=False)

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
            if rows is not None and self.hold_out is not None:
                self.contents[name] = content_key(rows)
            if name == "train" and rows is not None and self.hold_out is not None:
                one_text, lists = task_type(self.record).one_text, lists_in(self.record, rows)
                kept, held = held_out(len(rows), self.hold_out, self.seed, one_text, lists, _kinds_in(rows))
                self._splits[HELD_OUT, labelled] = self._encoded(HELD_OUT, rows.select(held), max_length)
                rows = rows.select(kept)
            own = labelled and name not in optional
            self._splits[name, labelled] = None if rows is None else self._encoded(name, rows, max_length, own)

    def _encoded(self, name: str, rows: Dataset, max_length: int, labelled: bool = True) -> Split:
        """Return a split of ``rows``, or of some of them, if the user limits their number.

        Texts that are to get a teacher's vectors get these as labels, if they need any.
        """
        one_text, available = task_type(self.record).one_text, len(rows)
        rows = rows if one_text else self._limited(name, rows)
        key = encoding_key(rows, self.tokenizer, self.record, max_length)
        encoded = encode(rows, self.tokenizer, self.record, max_length, key)
        if one_text and len(some := self._limited(name, encoded)) < len(encoded):
            encoded, key = some, short_hash(key, len(some))
        if cut := int(encoded.with_format("numpy")["truncated"][:].sum()):
            longest = f"data.max_length {max_length} (in tokens)"
            note(f"{self.record.name} {name}: {cut} of {len(encoded)} inputs are longer than {longest} and are cut")
        if self.record.wants_vectors and self.teacher is not None and labelled:
            encoded, key = add_targets(rows, encoded, key, self.teacher, self.record, max_length, self.eval_batch_size)
        return Split(rows, encoded, key, available)

    def _limited(self, name: str, rows: Dataset) -> Dataset:
        """Return the examples of a split, drawn if the user limits their number."""
        option, limit, seed = "data.train_examples", self.train_examples, self.seed
        if name != "train":
            option, limit, seed = "data.validation_examples", self.validation_examples, VALIDATION_SEED
        if limit is None or name not in {"train", *self.record.validation, *({ALL} & {self.predicted})}:
            return rows
        drawn = self._drawn(rows, limit, option, seed)
        note(f"{option}: {limit} of {len(rows)} {name} rows are read")
        return drawn

    def _drawn(self, rows: Dataset, number: int, option: str, seed: int | None) -> Dataset:
        """Return ``number`` rows in their order; with the same seed a smaller draw is part of a larger one."""
        if number > len(rows):
            raise UserError(f"{option}: {number} is more than there are; the largest is {len(rows)}")
        return rows.select(sorted(self._order(rows, seed)[:number]))

    def _order(self, rows: Dataset, seed: int | None) -> list[int]:
        """Return the order in which rows are drawn; None: by the data's own seed."""
        own = self.seed if seed is None else seed
        return drawn_order(len(rows), own, lists_in(self.record, rows), _kinds_in(rows))

    def facts(self) -> dict[str, Any]:
        """Return the facts of the data of fit: rows, classes, lengths, repeats; hashes of ``divided`` and dev rows."""
        splits = {name: (some.rows, some.encoded, some.available) for name, some in self._of_fit().items()}
        keys = {"divided": divided(self.record, self.place), "dev": self.dev_contents()}
        return data_facts(self.record, splits, self.max_length) | keys

    def dev_contents(self) -> list[str]:
        """Return a hash of the rows of every dev split that exists."""
        self.setup("validate")
        found = (self._splits[name, True] for name in self.record.validation)
        return [content_key(split.rows) for split in found if split is not None]

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

    def label_by(self, net: Any) -> None:
        """Label the dev texts with the vectors that ``net`` gives them, batch by batch as :meth:`val_dataloader`."""
        [loader], name = self.val_dataloader(), self.record.validation[0]
        split, vectors = self._split(name), vectors_of(net, loader, self.record)
        self._splits[name, True] = replace(split, encoded=with_vectors(split.encoded, vectors, f"{split.key}-own"))

    def train_dataloader(self) -> ResumableLoader:
        """Return this process's shares of the optimizer steps, in a new order every epoch."""
        return self._loader(self._of_fit()["train"], self.fewer(self.batch_size), True, self.global_batch)

    def val_dataloader(self) -> list[ResumableLoader]:
        """Return a loader for each validation split that exists; the first decides which epoch is best."""
        return [self._loader(split, self.eval_rows, shuffle=False) for split in self._validation()]

    def test_dataloader(self) -> ResumableLoader:
        """Return the batches of the test split, which must have labels."""
        self.setup("test")
        return self._loader(self._split("test"), self.eval_rows, shuffle=False)

    def predict_dataloader(self) -> ResumableLoader:
        """Return the batches of the test split if there is one, else of the first validation split."""
        self.setup("predict")
        return self._loader(self._split(self.predicted, False), self.eval_rows, shuffle=False)

    def calibration_dataloader(
        self, examples: int | None = None, seed: int | None = None, option: str = "fisher_examples"
    ) -> ResumableLoader:
        """Return the training examples once, in batches of similar length, for statistics instead of training.

        They are divided among processes; rows that only fill up a batch have index -1. ``examples`` are drawn by
        ``seed``, None for the data's own; None for all. ``option`` is their name in messages.

        Raises:
            UserError: more are asked for than there are.
        """
        split = self._of_fit()["train"]
        if examples is not None:
            split = replace(split, encoded=self._drawn(split.encoded, examples, option, seed))
        note(f"calibration: {len(split.encoded)} of {self.train_size()} training examples are read")
        return self._loader(split, self.fewer(self.batch_size), shuffle=False)

    def with_texts(self, path: str | None = None) -> DataModule:
        """Return the same data, with all rows of a file, which need no labels, in place of the training rows.

        Raises:
            UserError: the file cannot be read for the task.
        """
        self.setup("fit" if path is None else "validate")
        other = copy.copy(self)
        if path is not None:
            texts = copy.copy(self)
            texts.record = task_type(self.record).of_texts(self.record)
            try:
                rows = load_split_files(texts.record, replace(self.place, path=path), [ALL], False)[ALL]
            except UserError as error:
                raise UserError(str(error).replace("data.path", "--distil_texts")) from error
            train = texts._encoded(ALL, rows, self.max_length, labelled=False)
            other._splits = {**self._splits, ("train", True): train}
        return other

    def sample_dataloader(self, rows: int) -> ResumableLoader:
        """Return the batches of the rows of the first dev split that :meth:`sample` draws."""
        split = self._validation()[0]
        drawn = replace(split, encoded=split.encoded.select(self.sample(rows)))
        return self._loader(drawn, self.fewer(self.eval_batch_size), shuffle=False)

    def sample(self, rows: int) -> list[int]:
        """Return the numbers of at most ``rows`` rows of the first dev split, drawn alike for every seed."""
        return sorted(drawn_order(len(self._validation()[0].encoded), VALIDATION_SEED)[:rows])

    def _loader(self, split: Split, batch_size: int, shuffle: bool, size: int = 0) -> ResumableLoader:
        overfit = getattr(self.trainer, "overfit_batches", 0)
        if overfit > 0:
            raise UserError(
                f"trainer.overfit_batches: {overfit} would replace the order of the batches; use data.train_examples"
            )
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        order = BatchOrder(row_lengths(split.encoded), batch_size, self.seed, rank, world_size, shuffle, size)
        kind, pad = task_type(self.record), int(self.tokenizer.pad_token_id)
        available = None if kind.one_text else split.available
        return ResumableLoader(
            PaddedBatches(split.encoded, pad, kind.counts, split.rows, available),
            sampler=order,
            batch_size=None,  # the sampler gives whole batches
            num_workers=self.num_workers,
            pin_memory=pins_memory(),
            generator=torch.Generator(),  # of a seed for workers; not the global one, which dropout uses
        )

    def _validation(self) -> list[Split]:
        """Return the splits of a validation: the dev splits; in a Trainer, which chooses an epoch, held-out rows."""
        chooses = self.hold_out is not None and (self.choosing or self.trainer is not None)
        self.setup("fit" if chooses else "validate")
        splits = [self._splits[name, True] for name in ((HELD_OUT,) if chooses else self.record.validation)]
        return [split for split in splits if split is not None]

    def fingerprint(self, split: Sequence[int] | None = None) -> str:
        """Return a hash of the data of fit and of all settings that determine the training batches.

        ``split`` divides a step as :attr:`split`, which it is if nothing is given.
        """
        keys = [each.key for each in self._of_fit().values()]
        return short_hash(self.record, keys, prod(split or self.split), self.seed)


def _kinds_in(rows: Dataset) -> list[int] | None:
    return list(rows[KIND]) if KIND in rows.column_names else None
