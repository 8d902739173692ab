"""Arguments of codecs that are refused."""

import jaxslowmo as js
from support.refusals import Refusal, each

ROWS = {
    name: Refusal(lambda make=make: make(error_feedback=1), f"codecs.{name}: `error_feedback`", 1)
    for name, make in (("bfloat16", js.codecs.bfloat16), ("float16", js.codecs.float16))
}


@each(ROWS)
def test_refused(refusal):
    refusal.check()
