"""Question answering: a span of a context that answers a question (SQuAD v1.1, v2.0).

A context that is too long becomes several inputs (windows) that overlap by ``task.spans.stride`` tokens. The label of
a window that does not contain the whole answer, and of a question without one, is the first token ([CLS]). Start and
end are two distributions over a window's tokens: the loss is the mean of their cross-entropies, the distillation the
mean of their divergences. Padding has no part in them; the rest of the window does, as in BERT.

A question's best spans over all its windows are its n-best list; the score of "no answer" is the smallest of the
windows' scores at their first tokens. A question longer than half an input is truncated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_compress.tasks.base import Batch, Columns, TaskType, Tokenizer, token_columns
from lit_compress.tasks.classification import whole_number
from lit_compress.tasks.records import Task
from lit_compress.utils.errors import UserError

_NOWHERE = -1e4  # logit of padding; finite, so that 0 * log p is 0; representable in every half precision

# of a window: score of "no answer"; (score, begin, end) of its best spans, in characters
Piece = tuple[float, list[tuple[float, int, int]]]


class SpanQA(TaskType):
    """Question answering: logits [b, 2, tokens], labels [b, 2]: first and last token of the answer.

    Further columns: ``example`` [b], the number of a window's row; ``begin``, ``end`` [b, tokens], the characters of
    the context's tokens, ``end`` 0 for all other tokens.
    """

    name = "span_qa"
    auto_class = "AutoModelForQuestionAnswering"
    suffix = "ForQuestionAnswering"
    pipeline = "question-answering"
    stored: Any = {"text": ["string"], "answer_start": ["int64"]}
    scores = ("answer_f1", "exact_match")
    results = ("start_logits", "end_logits")
    per_token = True
    extras = ("id", "answer_start")
    own_head = True
    cuts_ends = False
    columns = ("question", "context")
    label = "answers"
    texts = (2, 2)
    length = 170
    max_length = 384
    means = "For every token, how well it is the first (start_logits) and the last (end_logits) of the answer."

    def label_of(self, task: Task, where: str, row: dict[str, Any]) -> dict[str, list[Any]]:
        """Return the answers' texts and first characters, ``{"text": [...], "answer_start": [...]}``, as on the hub.

        A plain text is one answer; its first character is in the column ``answer_start``, or is found if the context
        contains the text only once.
        """
        label, context = row[task.label], row[task.text[1]]
        if label is None or isinstance(label, str):
            label = {"text": [label] if label else [], "answer_start": _place(where, label, row, context)}
        texts, starts = (label.get(key) if isinstance(label, dict) else None for key in ("text", "answer_start"))
        if not (isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)):
            raise UserError(
                f"{where}: '{task.label}' is {label!r:.60}; give a text, or lists text and answer_start of one length"
            )
        if not texts and task.spans.null_threshold is None:
            raise UserError(
                f"{where}: the question has no answer; task '{task.name}' needs one, squad_v2 and any task with "
                "--data.null_threshold 0 do not"
            )
        for text, start in zip(texts, starts, strict=True):
            _check_place(where, text, start, context)
        return {"text": texts, "answer_start": starts}

    def encode(self, batch: Columns, rows: list[int], tokenizer: Tokenizer, task: Task, max_length: int) -> Columns:
        """Tokenise questions with the windows of their contexts."""
        # tokens left next to a long question
        room = max_length - max_length // 2 - tokenizer.num_special_tokens_to_add(pair=True)
        if room < 2:
            raise UserError(f"data.max_length: {max_length} leaves no room for a context; give 32 or more")
        questions, cut = _cut([text.lstrip() for text in batch[task.text[0]]], tokenizer, max_length // 2)
        tokens = tokenizer(
            questions, batch[task.text[1]], truncation="only_second", max_length=max_length,
            stride=min(task.spans.stride, room - 1), return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        sources = tokens["overflow_to_sample_mapping"]
        columns = token_columns(tokens)
        columns["truncated"] = [cut[i] for i in sources]
        columns["example"] = [rows[i] for i in sources]
        columns["begin"], columns["end"] = [], []
        for window, (i, offsets) in enumerate(zip(sources, tokens["offset_mapping"], strict=True)):
            context, parts = batch[task.text[1]][i], tokens.sequence_ids(window)
            spans = [span if part == 1 else (0, 0) for span, part in zip(offsets, parts, strict=True)]
            # some tokenizers add spaces to the beginning of a token
            columns["begin"].append([end - len(context[begin:end].lstrip()) for begin, end in spans])
            columns["end"].append([end for _, end in spans])
        if task.label in batch:
            columns["labels"] = [
                _tokens_of(batch[task.label][i], begins, ends)
                for i, begins, ends in zip(sources, columns["begin"], columns["end"], strict=True)
            ]
        return columns

    def logits(self, output: Any, batch: Batch) -> Tensor:
        """Return start and end logits, [b, 2, tokens]."""
        logits = torch.stack([output.start_logits, output.end_logits], dim=1)
        return logits.masked_fill(batch["attention_mask"][:, None] == 0, _NOWHERE)

    def pieces(self, task: Task, outputs: Tensor, batch: Batch) -> list[tuple[int, Piece]]:
        """Return for every window the number of its row and its n-best list."""
        places, scores = n_best(outputs, batch["begin"], batch["end"], task.spans.n_best, task.spans.max_answer)
        return list(zip(batch["example"].tolist(), as_pieces(places, scores), strict=True))

    def answer(self, task: Task, row: dict[str, Any], pieces: list[Piece]) -> dict[str, Any]:
        """Return ``answer``, its ``probability`` among ``n_best``; ``no_answer``: its score minus the best span's."""
        null, spans = merge(pieces, task.spans.n_best)
        threshold, context = task.spans.null_threshold, row[task.text[1]]
        texts = [context[begin:end] for _, begin, end in spans] + ([] if threshold is None else [""])
        if not texts:  # the context is empty
            return {"answer": "", "probability": 0.0, "n_best": []}
        scores = [score for score, *_ in spans] + ([] if threshold is None else [null])
        probabilities = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
        best = scores.index(max(scores[: len(spans)])) if spans else len(texts) - 1
        margin = null - scores[best]
        chosen = len(texts) - 1 if threshold is not None and (not spans or margin > threshold) else best
        listed = sorted(zip(texts, probabilities, strict=True), key=lambda pair: -pair[1])[: task.spans.n_best]
        return {
            "answer": texts[chosen], "probability": probabilities[chosen],
            **({} if threshold is None else {"no_answer": margin}),
            "n_best": [{"answer": text, "probability": p} for text, p in listed],
        }  # fmt: skip


def n_best(logits: Tensor, begin: Tensor, end: Tensor, number: int, longest: int) -> tuple[Tensor, Tensor]:
    """Return the spans of windows with the highest start logit + end logit, best first, and the score of "no answer".

    Every span of at most ``longest`` tokens is a candidate, not only those between the best starts and best ends.

    Args:
        logits: [b, 2, tokens], start and end logits.
        begin, end: [b, tokens], first characters and ends of the context's tokens; end 0 for other tokens.
        number, longest: how many spans, and tokens of the longest.

    Returns:
        Characters, begin and end, int [b, number, 2]; scores, float [b, 1 + number], first for "no answer" (at the
        first token), -inf where there is no span.
    """
    first, last = logits.masked_fill((end == 0)[:, None], -torch.inf).unbind(1)
    lasts = F.pad(last, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)  # [b, first, length - 1]
    score, place = (first[..., None] + lasts).flatten(1).topk(min(number, first.shape[1] * longest))
    start = place // longest
    stop = (start + place % longest).clamp_max(end.shape[1] - 1)
    missing = number - score.shape[1]  # a window may be shorter than the list
    places = F.pad(torch.stack([begin.gather(1, start), end.gather(1, stop)], dim=-1), (0, 0, 0, missing))
    score = F.pad(score, (0, missing), value=-torch.inf)
    return places, torch.cat([logits[:, :, 0].sum(1, keepdim=True), score], dim=1)


def as_pieces(places: Tensor, scores: Tensor) -> list[Piece]:
    """Return the results of :func:`n_best` as one tuple per window."""
    return [
        (null, [(score, *place) for score, place in zip(row, spans, strict=True) if score > -torch.inf])
        for (null, *row), spans in zip(scores.tolist(), places.tolist(), strict=True)
    ]


def merge(pieces: list[Piece], number: int) -> Piece:
    """Return the best spans of all windows of a question, each once, and the smallest score of "no answer"."""
    best: dict[tuple[int, int], float] = {}
    for _, spans in pieces:
        for score, begin, end in spans:
            best[begin, end] = max(score, best.get((begin, end), -torch.inf))
    ordered = sorted(((score, begin, end) for (begin, end), score in best.items()), key=lambda s: (-s[0], s[1], s[2]))
    return min(null for null, _ in pieces), ordered[:number]


def _place(where: str, text: str | None, row: dict[str, Any], context: str) -> list[int]:
    """Return the first character of an answer given as plain text, as a list; [] without an answer."""
    if not text:
        return []
    given = row.get("answer_start")
    if given is not None:
        if not (whole := whole_number(str(given))).isdecimal():
            raise UserError(f"{where}: answer_start {given!r:.60} is no whole number")
        return [int(whole)]
    first = context.find(text)
    if first != context.rfind(text):
        raise UserError(
            f"{where}: the answer '{text:.60}' is {context.count(text)} times in the context; choose one with a "
            "column answer_start"
        )
    return [max(first, 0)]


def _check_place(where: str, text: Any, start: Any, context: str) -> None:
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: an answer is {text!r:.60}; give text")
    if not isinstance(start, int) or isinstance(start, bool):
        raise UserError(f"{where}: answer_start {start!r:.60} is no whole number")
    if start >= 0 and context[start : start + len(text)] == text:
        return
    if text not in context:
        raise UserError(f"{where}: the answer '{text:.60}' is not in the context")
    places = [match for match in range(len(context)) if context.startswith(text, match)]
    nearest = min(places, key=lambda place: abs(place - start))
    raise UserError(f"{where}: the answer '{text:.60}' is not at character {start} of the context; nearest: {nearest}")


def _cut(questions: list[str], tokenizer: Tokenizer, longest: int) -> tuple[list[str], list[bool]]:
    """Return the questions, truncated to ``longest`` tokens, and which were truncated."""
    tokens = tokenizer(
        questions, truncation=True, max_length=longest, add_special_tokens=False, return_offsets_mapping=True
    )
    cut = [bool(encoding.overflowing) for encoding in tokens.encodings]
    ends = [offsets[-1][1] if offsets else 0 for offsets in tokens["offset_mapping"]]
    return [text[:end] if c else text for text, end, c in zip(questions, ends, cut, strict=True)], cut


def _tokens_of(answers: dict[str, list[Any]], begins: list[int], ends: list[int]) -> list[int]:
    """Return first and last token of the first answer in a window; [0, 0] if the window does not contain all of it."""
    inside = [i for i, end in enumerate(ends) if end]
    if not answers["text"] or not inside:
        return [0, 0]
    begin = answers["answer_start"][0]
    end = begin + len(answers["text"][0])
    if begins[inside[0]] > begin or ends[inside[-1]] < end:
        return [0, 0]
    first = next(i for i in inside if ends[i] > begin)
    last = next(i for i in reversed(inside) if begins[i] < end)
    return [first, max(first, last)]
