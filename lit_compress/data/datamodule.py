"""The DataModule of all tasks: rows -> token ids -> batches, whose order can be resumed."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_compress.data.batching import VALIDATION_SEED, BatchOrder, PaddedBatches, ResumableLoader, drawn_order
from lit_compress.data.custom import custom_task
from lit_compress.data.readers import Place
from lit_compress.data.sources import ALL, CUSTOM, located, sources_at
from lit_compress.data.splits import HELD_OUT, Split, Splits
from lit_compress.data.targets import pooling_of, vectors_of, with_vectors
from lit_compress.models.backbones import DEFAULT, load_config, resolve
from lit_compress.models.padding import usable_positions
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Custom, Task, get_task
from lit_compress.tasks.sentences import Pooling, read_pooling
from lit_compress.utils.cache import short_hash
from lit_compress.utils.devices import pins_memory
from lit_compress.utils.errors import UserError
from lit_compress.utils.hub import is_name
from lit_compress.utils.progress import note

if TYPE_CHECKING:
    from torch import Tensor

LONGEST = 512  # tokens of a sentence model that reads more; in training memory grows with them
SHORTEST = 4  # tokens; an input has at least its special tokens and a piece of text
LOGITS = 1 << 29  # over a vocabulary, that an evaluation batch has at most; its other tensors are smaller


def _check_sizes(**sizes: int | None) -> None:
    smallest = {"max_length": SHORTEST, "num_workers": 0, "stride": 0, "target_length": 2}
    for name, value in sizes.items():
        if value is not None and value < smallest.get(name, 1):
            raise UserError(f"data.{name}: {value} is too small; the smallest is {smallest.get(name, 1)}")


def _asked(settings: Any, **values: Any) -> Any:
    """Return ``settings`` with all values that are not None replaced."""
    return replace(settings, **{name: value for name, value in values.items() if value is not None})


class DataModule(Splits):
    """Read a task's data, tokenise it once, and make batches of texts of similar length.

    Args:
        task: name of the task, e.g. sst2; docstrings needs no download; custom is the user's own.
        backbone: folder or hub name whose tokenizer is used; follows model.backbone.
        path: folder with the files train and validation (and test) as .parquet, .jsonl, .json, .csv, .tsv or, plain
            text, .txt; a single file; a data set on the Hugging Face hub, OWNER/NAME[@REVISION], or the folder of a
            downloaded one; without it the task's data set on the hub.
        revision: branch, tag or commit of the data set on the hub; without it main. A run keeps the commit.
        batch_size: training examples per device and micro-batch.
        eval_batch_size: examples per device and batch in validation, test and predict; fewer if long texts and a
            large vocabulary give a batch more than 500 million logits.
        max_length: longest input in tokens, longer ones are truncated; without it the task's, or the
            backbone's limit if that is shorter.
        train_examples: number of training examples to draw (by seed); without it all.
        validation_examples: number of examples to draw of each validation split, the same for every seed; without it
            all. A test split is never reduced, and predict uses all rows unless it is given this option itself.
        hold_out: number of training rows (drawn by seed) that are not trained on. They take the place of the dev set
            while a stage trains, so that they choose its best epoch; the dev set is measured when it is finished.
        num_workers: processes that load batches ahead; does not change results.
        seed: decides the order of the batches, and which training examples are drawn.
        split_seed: decides how a single file is split; other than the seed, so that all seeds share one dev set.
        custom: type, columns and labels of task custom.
        encoding: of text files, e.g. cp1252 or utf-16; without it UTF-8.
        separator: sign between the fields of text files; without it a comma, in .tsv a tab, or what the header has.
        stride: number of tokens that neighbouring windows of a context share (span_qa); without it 128.
        null_threshold: by how much the score of "no answer" must exceed the best span's score to be given (span_qa);
            without it the task's; for custom every question has an answer.
        target_length: longest generated text, in tokens (summarization); without it the model's own, or 128. Reference
            texts are cut to it in training, or to 128.
        num_beams: number of beams in beam search (summarization); without it the model's own, or 8.
        length_penalty: the log-likelihood of a generated text is divided by its length to this power (summarization);
            without it 1.
        pooling: how a text's vector is made of the states of its tokens (embedding): mean, cls (the first one),
            lasttoken, max, weightedmean or mean_sqrt_len_tokens, or several joined by +; without it the pooling of the
            teacher's or the backbone's folder of sentence-transformers, else mean.
        normalize: whether predictions and exports divide vectors by their length (embedding); without it the same.
        teacher: folder or name of the model whose vectors are learned (embedding); follows model.teacher.
    """

    def __init__(
        self,
        task: str = "sst2",
        backbone: str = DEFAULT,
        path: str | None = None,
        revision: str | None = None,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        max_length: int | None = None,
        train_examples: int | None = None,
        validation_examples: int | None = None,
        hold_out: int | None = None,
        num_workers: int = 0,
        seed: int = 42,
        split_seed: int = 42,
        custom: Custom = Custom(),
        encoding: str | None = None,
        separator: str | None = None,
        stride: int | None = None,
        null_threshold: float | None = None,
        target_length: int | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        pooling: str | None = None,
        normalize: bool | None = None,
        teacher: str | None = None,
    ) -> None:
        super().__init__()
        if path is not None and (repository := located(task, path, revision, custom.configuration)) is not None:
            path, revision = str(repository.folder), None
        self.place = Place(path, encoding, separator, split_seed, revision=revision)
        self.record: Task = custom_task(custom, self.place) if task == CUSTOM else get_task(task)
        spans = _asked(self.record.spans, stride=stride, null_threshold=null_threshold)
        options = (("target_length", target_length), ("num_beams", num_beams), ("length_penalty", length_penalty))
        asked: dict[str, Any] = {name: value for name, value in options if value is not None}
        writing = replace(self.record.writing, **asked, asked=tuple(asked))
        self.record = replace(self.record, spans=spans, writing=writing, split_words=custom.split_words)
        self._asked_pooling = {"tokens": pooling, "normalize": normalize}
        if task_type(self.record).pools:
            self._pool_as(pooling_of(self._place_of(backbone), teacher and self._place_of(teacher)))
        _check_sizes(
            batch_size=batch_size, eval_batch_size=eval_batch_size, max_length=max_length, num_beams=num_beams,
            train_examples=train_examples, validation_examples=validation_examples, hold_out=hold_out, stride=stride,
            num_workers=num_workers, target_length=target_length,
        )  # fmt: skip
        self.task = task
        self.backbone = backbone
        self.teacher: str | None = teacher or backbone  # None: texts that want its vectors get them by :meth:`label_by`
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.train_examples, self.validation_examples = train_examples, validation_examples
        self.hold_out, self.num_workers = hold_out, num_workers
        self.seed = seed
        self.reads_labels = True  # False: the training rows may have none, as only their texts are read
        self._asked_length = max_length
        self.choosing = False  # True: scores choose a model, also without a Trainer, and so are of held-out rows
        self.predicted = ""  # name of the split for predict

    def _place_of(self, backbone: str) -> str:
        """Return the folder of a named backbone; the default one, which says nothing of pooling, is not asked for."""
        return resolve(backbone, self.record) if is_name(backbone) and backbone != DEFAULT else backbone

    def read_as(self, folder: str) -> None:
        """Read with the tokenizer of the model in ``folder``, and make vectors as it does, if its files say how."""
        self.backbone = folder
        if task_type(self.record).pools:
            self._pool_as(read_pooling(Path(folder), "data"))

    def _pool_as(self, pooling: Pooling | None) -> None:
        if pooling is not None:
            self.record = replace(self.record, pooling=_asked(pooling, **self._asked_pooling))

    @functools.cached_property
    def limit(self) -> int:
        """Number of tokens that the backbone can read, or its tokenizer gives; 1e30 if nothing limits it."""
        positions = usable_positions(load_config(self.backbone, self.record))
        return min(self.tokenizer.model_max_length, positions or self.tokenizer.model_max_length)

    @property
    def max_length(self) -> int:
        """Longest input in tokens; longer ones are truncated."""
        usual = self.record.max_length if self.record.pooling.max_length is None else LONGEST
        return min(self.deployed_length, self._asked_length or usual)

    @functools.cached_property
    def deployed_length(self) -> int:
        """Longest input of the export in tokens; a sentence model keeps its own limit unless another was asked for."""
        limit = self.limit
        if self._asked_length is None:
            return min(self.record.pooling.max_length or self.record.max_length, limit)
        if self._asked_length > limit:
            raise UserError(
                f"data.max_length: {self._asked_length} is more than '{self.backbone}' reads; the largest is {limit}"
            )
        return self._asked_length

    @property
    def eval_rows(self) -> int:
        """Examples per device and batch without training: ``eval_batch_size``, or as many as have :data:`LOGITS`."""
        logits = task_type(self.record).predicted_tokens(self.record, self.max_length) * len(self.tokenizer)
        return max(1, min(self.eval_batch_size, LOGITS // logits)) if logits else self.eval_batch_size

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

    def label_by(self, net: Any) -> None:
        """Label the dev texts with the vectors that ``net`` gives them, batch by batch as :meth:`val_dataloader`."""
        [loader], name = self.val_dataloader(), self.record.validation[0]
        split = self._split(name)
        vectors = vectors_of(net, loader, self.record)
        self._splits[name, True] = replace(split, encoded=with_vectors(split.encoded, vectors, f"{split.key}-own"))

    def train_dataloader(self) -> ResumableLoader:
        """Return this process's shares of the optimizer steps, in a new order every epoch."""
        return self._loader(self._of_fit()["train"], self.batch_size, shuffle=True, accumulate=self.accumulate)

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
        return self._loader(self._split(self.predicted, labelled=False), self.eval_rows, shuffle=False)

    def calibration_dataloader(
        self, examples: int | None = None, seed: int | None = None, option: str = "fisher_examples"
    ) -> ResumableLoader:
        """Return the training examples once, in batches of similar length, for statistics instead of training.

        They are divided among processes; rows that only fill up a batch have index -1.

        Args:
            examples, seed: number of examples to draw, None for all, and the seed, None for the data's own.
            option: name of ``examples`` in messages.

        Raises:
            UserError: more are asked for than there are.
        """
        split = self._of_fit()["train"]
        if examples is not None:
            split = replace(split, encoded=self._drawn(split.encoded, examples, option, seed))
        note(f"calibration: {len(split.encoded)} of {self.train_size()} training examples are read")
        return self._loader(split, self.batch_size, shuffle=False)

    def with_texts(self, path: str | None = None) -> DataModule:
        """Return the same data, with all rows of a file, which need no labels, in place of the training rows.

        Raises:
            UserError: the file cannot be read for the task.
        """
        self.setup("fit" if path is None else "validate")
        other = copy.copy(self)
        if path is not None:
            other._splits = {**self._splits, ("train", True): self._texts_of(path)}
        return other

    def rest_dataloader(self, examples: int, rows: int, seed: int | None = None) -> ResumableLoader:
        """Return training examples that :meth:`calibration_dataloader` leaves out; the last drawn if it leaves too few.

        Args:
            examples, seed: of the calibration's draw.
            rows: how many are wanted; all of fewer.
        """
        split = self._of_fit()["train"]
        order = self._order(split.encoded, seed)
        first = max(0, min(examples, len(order) - rows))
        chosen = order[first : first + rows]
        if both := min(len(chosen), examples - first):
            note(f"too few training rows: {both} of the {len(chosen)} held-out rows also calibrate")
        return self._loader(replace(split, encoded=split.encoded.select(sorted(chosen))), self.eval_rows, shuffle=False)

    def sample_dataloader(self, rows: int) -> ResumableLoader:
        """Return the batches of the rows of the first dev split that :meth:`sample` draws."""
        split = self._validation()[0]
        drawn = replace(split, encoded=split.encoded.select(self.sample(rows)))
        return self._loader(drawn, self.eval_rows, shuffle=False)

    def sample(self, rows: int) -> list[int]:
        """Return the numbers of at most ``rows`` rows of the first dev split, drawn alike for every seed."""
        return sorted(drawn_order(len(self._validation()[0].encoded), VALIDATION_SEED)[:rows])

    def on_before_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        """Note in ``padded`` whether the batch has padding: on the device, the host would wait for the answer."""
        self.padded = not all(bool(mask.all()) for mask in task_type(self.record).masks(batch))
        return batch

    def _loader(self, split: Split, batch_size: int, shuffle: bool, accumulate: int = 1) -> ResumableLoader:
        overfit = getattr(self.trainer, "overfit_batches", 0)
        if overfit > 0:
            raise UserError(
                f"trainer.overfit_batches: {overfit} would replace the order of the batches; use data.train_examples"
            )
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        lengths = split.encoded.with_format("numpy")["length"][:].tolist()
        options: dict[str, Any] = {
            "sampler": BatchOrder(lengths, batch_size, self.seed, rank, world_size, shuffle, accumulate),
            "batch_size": None,  # the sampler gives whole batches
            "num_workers": self.num_workers,
            "pin_memory": pins_memory(),
            # a loader draws a seed for its workers; not from the global generator, which dropout uses
            "generator": torch.Generator(),
        }
        kind, pad = task_type(self.record), int(self.tokenizer.pad_token_id)
        available = None if kind.one_text else split.available
        return ResumableLoader(PaddedBatches(split.encoded, pad, kind.counts, split.rows, available), **options)

    def _validation(self) -> list[Split]:
        """Return the splits of a validation: the dev splits; in a Trainer, which chooses an epoch, held-out rows."""
        chooses = self.hold_out is not None and (self.choosing or self.trainer is not None)
        self.setup("fit" if chooses else "validate")
        splits = [self._splits[name, True] for name in ((HELD_OUT,) if chooses else self.record.validation)]
        return [split for split in splits if split is not None]

    def fingerprint(self) -> str:
        """Return a hash of the data of fit and of all settings that determine the training batches."""
        return short_hash(self.record, [split.key for split in self._of_fit().values()], self.global_batch, self.seed)
