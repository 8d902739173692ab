"""What each instruction of a compiled step is for."""

from jaxslowmo.reports._step_times import StepProgram, Work
from support.compiled_step import TEXT


def test_instructions_are_told_apart():
    program = StepProgram(TEXT)
    assert program.name == "jit_f"
    for name, expected in {
        "fusion.1": Work("forward"),
        "fusion.2": Work("backward"),  # by what it holds
        "copy.1": Work("other"),
        "adam": Work("other"),
        "ar-start": Work("", "gradients"),
        "ar-done": Work("", "gradients", "ar-start"),
        "spread.1": Work("backward", "gradients"),
        "cond.1": Work(),
        "slow.1": Work("", "slow"),
        "inserted": Work("", "slow"),
        "pp-start": Work("", "round 0"),
        "pp-done": Work("", "round 0", "pp-start"),
        "statistics": Work("", "model_state"),
        "tensor": Work("", "backward"),
        "to_host": Work("other"),
    }.items():
        assert program.work(name) == expected, name
    assert program.work("call.1") == Work("forward")
    assert StepProgram(TEXT).work("call.1", {"in_call"}) == Work()
    assert program.work("elsewhere") is None
