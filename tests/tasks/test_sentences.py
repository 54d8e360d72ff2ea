"""Vectors of all sentence models are those of sentence-transformers, also after its files were written anew."""

import json
import random
import shutil

import pytest
import torch
from tiny import WORDS, read_rows, write_bert, write_rows

from lit_compress.__main__ import main
from lit_compress.data.datamodule import DataModule
from lit_compress.export.program import read_program, write_program
from lit_compress.models.backbones import load_finetuned
from lit_compress.tasks import task_type
from lit_compress.tasks.records import Custom
from lit_compress.tasks.sentences import read_pooling, write_pooling
from lit_compress.utils.errors import UserError


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A BERT, a Qwen3 that pads at the left and puts an end after every text, and texts."""
    from tokenizers.processors import TemplateProcessing
    from transformers import BertTokenizer

    folder, rng = tmp_path_factory.mktemp("sentences"), random.Random(0)
    for name, side in (("bert", "right"), ("qwen3", "left")):
        model = write_bert(folder / name, "stsb_embedding", name, dropout=0.0, initializer_range=0.3)
        tokenizer = BertTokenizer(str(model / "vocab.txt"), padding_side=side, do_lower_case=False)
        if name == "qwen3":
            end = TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
            tokenizer.backend_tokenizer.post_processor = end
        tokenizer.save_pretrained(model)
    rows = [{"text": " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))} for _ in range(24)]
    rows[3]["text"] = rows[3]["text"].upper()
    write_rows(folder / "texts", train=rows[:16], validation=[*rows[16:], rows[3]])
    return folder


@pytest.fixture(scope="module")
def texts(place):
    return [row["text"] for row in read_rows(place / "texts" / "validation.jsonl")]


def data_of(place, model):
    return DataModule("custom", str(model), str(place / "texts"), custom=Custom(kind="embedding"))


def _save(folder, net, mode="mean", modules=(), settings=None, own=None, **options):
    """Save a sentence model with the library itself; what it cannot save any more is written beside it."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers import models as library

    torch.manual_seed(0)
    made = [library.Transformer(str(net), max_seq_length=16), library.Pooling(32, pooling_mode=mode)]
    SentenceTransformer(modules=made + [module(library) for module in modules], device="cpu", **options).save(
        str(folder)
    )
    for name, values in (("sentence_bert_config.json", own), ("1_Pooling/config.json", settings)):
        if values:
            path = folder / name
            path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def _normalize(library):
    return library.Normalize()


MODELS = {
    "mean": {},
    "cls": {"mode": "cls", "modules": [_normalize]},
    "last": {"mode": "lasttoken", "modules": [_normalize]},
    "prompt": {"prompts": {"query": "a film ", "document": ""}, "default_prompt_name": "query"},
    "cut": {"modules": [_normalize], "truncate_dim": 10, "similarity_fn_name": "dot"},
    "lower": {"own": {"do_lower_case": True}},
    "short": {"own": {"max_seq_length": 5}},
    "two lengths": {"own": {"query_length": 4, "document_length": 6}},
}  # fmt: skip


def _theirs(folder, texts, what="encode"):
    from sentence_transformers import SentenceTransformer

    return torch.tensor(getattr(SentenceTransformer(str(folder), device="cpu"), what)(texts))


LEFT = ("mean", "cls", "last")  # where the side of the padding could matter


@pytest.mark.slow
@pytest.mark.parametrize("base, name", [*(("bert", name) for name in MODELS), *(("qwen3", name) for name in LEFT)])
def test_vectors_are_those_of_sentence_transformers(place, texts, tmp_path, base, name):
    """Read from the folder of the library, and read by the library from files that an export has."""
    model = _save(tmp_path / "model", place / base, **MODELS[name])
    data = data_of(place, model)
    expected = _theirs(model, texts)
    net, kind = load_finetuned(str(model), data.record), task_type(data.record)
    [batch] = list(data.predict_dataloader())
    with torch.no_grad():
        found = kind.outputs(net, batch, data.tokenizer)
    assert torch.allclose(found[:, 0], expected[batch["index"]], atol=1e-5)
    answer = kind.answer(data.record, {}, [found[0]])
    assert answer["vector"] == pytest.approx(expected[batch["index"][0]].tolist(), abs=1e-5)
    written = shutil.copytree(place / base, tmp_path / "written")
    write_pooling(written, 32, data.deployed_length, data.record.pooling)
    assert torch.allclose(_theirs(written, texts), expected, atol=1e-6)
    for what in ("encode_query", "encode_document"):
        assert torch.allclose(_theirs(written, texts, what), _theirs(model, texts, what), atol=1e-6)
    if name == "two lengths":  # the texts are long enough for the lengths to count
        assert not torch.allclose(_theirs(model, texts, "encode_query"), expected, atol=1e-3)
    again, own = read_pooling(written, "model"), data.record.pooling
    assert [again.similarity, again.prompts, again.dim] == [own.similarity, own.prompts, own.dim]


@pytest.mark.slow
def test_programs_give_the_vectors(place, texts, tmp_path):
    """Of one text, and of a padded batch, as the tokenizer of the folder pads it."""
    pytest.importorskip("onnxruntime")
    model = _save(tmp_path / "model", place / "qwen3", mode="lasttoken", modules=[_normalize])
    data = data_of(place, model)
    net = load_finetuned(str(model), data.record)
    made = write_program(net, data.tokenizer, tmp_path, "onnx", task_type(data.record))
    assert made["outputs"] == ["last_hidden_state", "sentence_embedding"]
    run, expected = read_program(tmp_path / made["file"], tuple(made["outputs"])), _theirs(model, texts)
    for some in ([0], range(len(texts))):
        tokens = data.tokenizer([texts[i] for i in some], padding=True, return_tensors="pt")
        found = run({name: tokens[name] for name in made["inputs"]})
        assert found["last_hidden_state"].shape == (*tokens["input_ids"].shape, 32)
        assert torch.allclose(found["sentence_embedding"], expected[list(some)], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_run_keeps_how_vectors_are_made(place, texts, tmp_path):
    """Its teacher's way, not its backbone's; it is evaluated and exports the same when both are gone."""
    import sentence_transformers

    teacher = _save(tmp_path / "teacher", place / "bert", "cls", modules=[_normalize], truncate_dim=10)
    backbone = _save(tmp_path / "backbone", place / "bert", "lasttoken")
    main(["fit", "--model", "SVD", "--model.density", "1.0", "--model.backbone", str(backbone), "--model.teacher",
          str(teacher), "--data.task", "custom", "--data.custom.kind", "embedding", "--data.path", str(place / "texts"),
          "--model.retrain.epochs", "0", "--trainer.logger", "false", "--trainer.accelerator", "cpu",
          "--trainer.enable_progress_bar", "false", "--run_dir", str(tmp_path / "run")])  # fmt: skip
    expected = _theirs(teacher, texts)
    shutil.rmtree(teacher), shutil.rmtree(backbone)
    for target in ("run", "run/retrain/net"):
        main(["validate", str(tmp_path / target)])
    main(["export", str(tmp_path / "run"), str(tmp_path / "again")])
    main(["export", str(tmp_path / "run"), str(tmp_path / "table"), "--embeddings", "int8"])
    for name, off in (("run/export", 1e-4), ("again", 1e-4), ("table", 0.02)):
        net = sentence_transformers.SentenceTransformer(str(tmp_path / name), device="cpu", trust_remote_code=True)
        assert torch.allclose(torch.tensor(net.encode(texts)), expected, atol=off)


@pytest.mark.parametrize("asked, tokens", [(40, 40), (1000, 64)])
def test_the_longest_text_is_that_of_its_own_file(place, tmp_path, asked, tokens):
    """Also if the tokenizer's is shorter; no longer than the positions."""
    from sentence_transformers import SentenceTransformer

    model = _save(tmp_path / "model", place / "bert", own={"max_seq_length": asked})
    data = data_of(place, model)
    assert data.deployed_length == data.max_length == tokens
    assert min(SentenceTransformer(str(model), device="cpu").max_seq_length, 64) == tokens


@pytest.mark.parametrize(
    "made, line",
    [
        ({"modules": [lambda library: library.LayerNorm(32)]}, "by Transformer, Pooling, LayerNorm .modules.json."),
        ({"modules": [lambda library: library.Dense(32, 8)]}, "Pooling, Dense .modules.json.; Pooling and Normalize"),
        ({"modules": [_normalize, _normalize]}, "Pooling and Normalize, in this order, can be kept"),
        ({"settings": {"include_prompt": False}}, "leaves the prompt out of the pooling"),
        ({"settings": {"pooling_mode": "attention"}}, "unknown 'attention'; valid: cls, mean, lasttoken"),
        ({"mode": "max"}, "unknown 'max'; valid: cls, mean, lasttoken"),
        ({"mode": ("mean", "cls")}, "unknown 'mean.cls'; "),
        ({"settings": {"pooling_mode": None, "pooling_mode_max_tokens": True}}, "unknown 'max_tokens'; "),
        ({"own": {"modality_config": {"text": {"method_output_name": "pooler_output"}}}}, "pools 'pooler_output'"),
    ],
)  # fmt: skip
def test_other_ways_to_make_vectors_are_refused(place, tmp_path, made, line):
    model = _save(tmp_path / "model", place / "bert", **made)
    with pytest.raises(UserError, match=f"^model.backbone: '.*{line}"):
        data_of(place, model)


def test_a_class_of_another_package_is_not_the_librarys(place, tmp_path):
    model = _save(tmp_path / "model", place / "bert")
    modules = json.loads((model / "modules.json").read_text())
    modules[0]["type"] = "custom_st.Transformer"
    (model / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match=r"makes vectors by custom_st\.Transformer, Pooling \(modules\.json\)"):
        data_of(place, model)


def test_broken_files_are_named(place, tmp_path):
    model = _save(tmp_path / "model", place / "bert")
    modules = (model / "modules.json").read_text()
    shutil.move(model / "1_Pooling", tmp_path / "elsewhere")
    for path in ("../elsewhere", str(tmp_path / "elsewhere"), "1_Pooling"):  # the last is a link
        (model / "modules.json").write_text(modules.replace("1_Pooling", path))
        with pytest.raises(UserError, match=r"names a module outside of its folder, '.*' \(modules.json\)"):
            data_of(place, model)
        if path != "1_Pooling" and not (model / "1_Pooling").exists():
            (model / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    (model / "modules.json").write_text("[{}]")
    with pytest.raises(UserError, match=r"model.backbone: '.*': its modules.json is broken"):
        data_of(place, model)
    with pytest.raises(UserError, match=r"data.pooling: unknown 'clss'; did you mean 'cls'"):
        DataModule("custom", str(place / "bert"), str(place / "texts"), custom=Custom("embedding"), pooling="clss")
