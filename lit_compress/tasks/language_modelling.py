"""The next token of plain text (OPT, Llama, Qwen3).

Rows of a split, about 1000 at a time, are one text, every row ending with a line end. Its tokens, after one special
token (beginning of text), are divided into examples of the largest length; the last one is shorter. The labels of an
example are its tokens shifted by one, so that every token of the text is predicted exactly once.

    tokens  <s> a b c d e f      examples of 3: <s> a b | c d e      labels  a b c | d e f
"""

from __future__ import annotations

from torch import Tensor

from lit_compress.numerics.losses import task_loss
from lit_compress.tasks.base import KIND, Batch, Columns, Metrics, Model, TaskType, Tokenizer
from lit_compress.tasks.records import Task


class LanguageModelling(TaskType):
    """Language modelling: logits [b, tokens, vocabulary], labels [b, tokens], at every token the next one."""

    name = "language_modelling"
    auto_class = "AutoModelForCausalLM"
    suffix = ("ForCausalLM", "LMHeadModel")  # GPT-2's name is older
    pipeline = "text-generation"
    stored = "string"  # the text is its own label
    scores = ("perplexity",)
    answered = False
    label = "text"
    per_token = one_text = reads_labels = over_vocabulary = own_head = True
    cuts_ends = False
    length = max_length = 512
    sample = '"Once upon a time"'
    means = (
        "Logits of the next token; `model.generate(**inputs)` continues with a text. The perplexity counts all "
        "tokens of the split, each predicted from those before it in its block."
    )

    def encode(self, batch: Columns, rows: list[int], tokenizer: Tokenizer, task: Task, max_length: int) -> Columns:
        """Divide the text of all rows into examples of tokens; every kind of text by itself."""
        texts: dict[int, list[str]] = {}
        for kind, row in zip(batch.get(KIND, [0] * len(rows)), batch[task.text[0]], strict=True):
            texts.setdefault(kind, []).append(row if row.endswith("\n") else row + "\n")
        columns: Columns = {"input_ids": [], "labels": [], KIND: []}
        for kind, parts in texts.items():
            blocks, labels = _divided("".join(parts), tokenizer, max_length)
            columns["input_ids"] += blocks
            columns["labels"] += labels
            columns[KIND] += [kind] * len(blocks)
        columns["length"] = [len(block) for block in columns["input_ids"]]
        columns["truncated"] = [False] * len(columns["input_ids"])
        return columns if KIND in batch else {name: columns[name] for name in columns if name != KIND}

    def outputs(self, net: Model, batch: Batch, tokenizer: Tokenizer) -> Tensor:
        """Return the negative log-likelihood of every next token, [b, tokens], in nats."""
        logits, labels = self.logits(self.run(net, batch), batch), batch["labels"]
        return task_loss(logits, labels, self.loss, "none").view(labels.shape)

    def observe(self, metrics: Metrics, outputs: Tensor, batch: Batch) -> None:
        """Update the metrics with the likelihoods."""
        metrics.update(outputs, self.counted(batch))

    def dev_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the mean over the counted tokens."""
        return outputs[self.counted(batch)].mean()


def _divided(text: str, tokenizer: Tokenizer, max_length: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the inputs and the labels of a text's examples."""
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    tokens = start + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    starts = range(0, len(tokens) - 1, max_length)
    blocks = [tokens[i : i + max_length] for i in starts]
    labels = [tokens[i + 1 : i + 1 + max_length] for i in starts]
    if blocks and len(labels[-1]) < len(blocks[-1]):
        blocks[-1].pop()  # nothing follows the last token
    return blocks, labels
