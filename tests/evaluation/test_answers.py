"""What changes between the answers of two nets."""

from __future__ import annotations

import pytest

from lit_compress.evaluation.answers import changes, sign_test


def lines(*triples):
    return [
        {"texts": {"sentence": str(n)}, "given": given, "answers": [before, after]}
        for n, (given, before, after) in enumerate(triples)
    ]


def test_classes_have_a_table_and_those_that_became_wrong_come_first():
    found = changes(lines(("a", "b", "a"), ("a", "a", "b"), ("b", "b", "b"), ("a", "a", "b")), "classification", "ab")
    assert (found["rows"], found["changed"], found["became_wrong"], found["became_right"]) == (4, 3, 2, 1)
    assert found["confusion"] == {"labels": ["a", "b"], "before": [[2, 1], [0, 1]], "after": [[1, 2], [0, 1]]}
    assert [line["texts"]["sentence"] for line in found["examples"]] == ["1", "3", "0"]
    assert found["p_value"] == pytest.approx(sign_test(2, 1))


def test_other_answers():
    numbers = changes(lines((1.0, 0.9, 0.8), (2.0, 2.5, 0.5)), "regression")
    assert numbers["changed"] is None and numbers["examples"][0]["after"] == 0.5
    tags = changes(lines((["O", "B"], ["O", "B"], ["O", "O"])), "tagging")
    assert tags["became_wrong"] == 1 and "confusion" not in tags
    texts = changes(lines(("a b", "a", "b"), ("c", "c", "c")), "summarization")
    assert texts["changed"] == 1 and "p_value" not in texts
    assert changes([], "classification") is None


def test_the_sign_test_is_exact():
    scipy = pytest.importorskip("scipy.stats")
    for wrong, right in ((9, 1), (5, 5), (0, 0), (30, 12)):
        expected = scipy.binomtest(wrong, wrong + right).pvalue if wrong + right else 1.0
        assert sign_test(wrong, right) == pytest.approx(expected)
