"""Tables: how cells are aligned and what is never broken."""

from lit_compress.utils.tables import markdown_table, screen_table


def test_the_first_columns_are_on_the_left_and_stay_whole():
    table = screen_table(["name", "net", "ms"], [["a", "b", "1"], ["c", "d", "2"]], left=2, whole=1)
    assert [column.justify for column in table.columns] == ["left", "left", "right"]
    assert [column.no_wrap for column in table.columns] == [True, False, False]
    assert [list(column.cells) for column in table.columns] == [["a", "c"], ["b", "d"], ["1", "2"]]


def test_markdown():
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"
