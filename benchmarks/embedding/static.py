"""Static vectors of a sentence model: a table with one vector per token in place of all blocks.

    python -m benchmarks.embedding.static --backbone DIR --data DIR [--work DIR] [--questions N]

The vector of a token is the model's for the text that is this token alone, less the mean over the vocabulary. A text is
the mean of its tokens, each with the weight a / (a + its share of run.py's wide texts), a = 1e-3 (SIF, Arora et al.
2017). Nothing is trained. Scores are similarity on STS-B's dev pairs and both searches of run.py. For models with
[CLS] and [SEP] around a text. Writes benchmarks/embedding/results/static/sif.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import common
from benchmarks.embedding import estimates, run

STUDY, NAME = "embedding/static", "sif"
RARE = 1e-3  # a of SIF: tokens with this share of all texts have half of the weight
BATCH = 1024


class Table(nn.Module):
    """Hidden states [rows, tokens, width] of tokens alone, in place of embeddings."""

    def __init__(self, vectors: torch.Tensor) -> None:
        super().__init__()
        self.vectors = nn.Parameter(vectors)

    def forward(self, input_ids: torch.Tensor, **others: Any) -> torch.Tensor:
        """Return the vectors of tokens [rows, tokens]."""
        return self.vectors[input_ids]


class NoBlocks(nn.Module):
    """An encoder that keeps its hidden states."""

    def forward(self, hidden_states: torch.Tensor, *others: Any, **more: Any) -> Any:
        """Return them as a model's blocks do."""
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions as Output

        return Output(last_hidden_state=hidden_states)


@torch.no_grad()
def vectors_of(net: Any, tokenizer: Any, file: Path) -> torch.Tensor:
    """Return the vectors of all tokens [vocabulary, width], weighted by their shares of the texts of a file."""
    special = torch.tensor(tokenizer.all_special_ids)
    rows = []
    for ids in torch.arange(net.config.vocab_size).split(BATCH):
        ends = (torch.full_like(ids, end) for end in (tokenizer.cls_token_id, tokenizer.sep_token_id))
        states = net(input_ids=torch.stack([next(ends), ids, next(ends)], 1)).last_hidden_state
        rows.append(states.mean(1))
    found = torch.cat(rows)
    read = tokenizer(file.read_text().splitlines(), add_special_tokens=False, verbose=False)["input_ids"]
    counts = torch.bincount(torch.tensor([token for text in read for token in text]), minlength=len(found))
    weights = RARE / (RARE + counts / counts.sum())
    weights[special] = 0.0
    return (found - found.mean(0)) * weights[:, None]


def main() -> None:
    """Measure what is missing."""
    from transformers import AutoTokenizer

    from lit_compress.cli.factorizing import load_model

    parser = common.parser(STUDY, __doc__, "backbone", "data", work=Path("runs/embedding"))
    parser.add_argument("--questions", type=int, default=run.MANY)
    options = parser.parse_args()
    options.list = None
    torch.set_num_threads(options.threads)
    if not common.missing(options, NAME):
        return
    texts = run.wide_texts(options)
    job = estimates.opened(options, *estimates.CUSTOM, "--data.path", run.texts_alone(options)).build()
    net = load_model(str(options.backbone), job.method).eval()
    net.embeddings = Table(vectors_of(net, AutoTokenizer.from_pretrained(options.backbone), texts))
    net.encoder = NoBlocks()
    scores, size = estimates.scores(options, net, options.questions), 4 * net.embeddings.vectors.numel()
    made = {"name": NAME, "threads": options.threads, "scores": scores, "bytes": size}
    common.write(options, NAME, made | common.frame())
    print(made)


if __name__ == "__main__":
    main()
