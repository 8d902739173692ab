"""What `docs/tpu.md` compiles for a described slice, and what it says that this prints."""

from recipes.doc_blocks import TPU, fresh, outputs


def test_it_prints_what_the_page_shows(capsys):
    fresh("tpu", "", *TPU)
    shown = [text for title in TPU for text in outputs("tpu", title)]
    assert capsys.readouterr().out == "".join(shown)
