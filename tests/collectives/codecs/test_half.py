"""The 16-bit codecs as values of an argument."""

import pytest

import jaxslowmo as js


@pytest.mark.parametrize("make", [js.codecs.bfloat16, js.codecs.float16])
def test_equal_arguments_make_equal_codecs(make):
    assert make() == make(error_feedback=False)
    assert hash(make(error_feedback=True)) == hash(make(error_feedback=True))
    assert make() != make(error_feedback=True)
    assert js.codecs.bfloat16() != js.codecs.float16()


def test_it_shows_how_it_is_written():
    assert repr(js.codecs.float16(error_feedback=True)) == "js.codecs.float16(error_feedback=True)"
    assert eval(repr(js.codecs.bfloat16())) == js.codecs.bfloat16()


@pytest.mark.parametrize("make", [js.codecs.bfloat16, js.codecs.float16])
@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_error_feedback_is_true_or_false(make, wrong):
    message = rf"codecs.{make.__name__}: `error_feedback` must be True or False, got {wrong!r}"
    with pytest.raises(ValueError, match=message):
        make(error_feedback=wrong)
