"""The text of a compiled step that holds a bit of everything, as the statistics read it."""


def line(name, opcode, operands="", scope="", **attributes):
    parts = [f"{key}={value}" for key, value in attributes.items()]
    if scope:
        parts.append(f'metadata={{op_name="jit(f)/shard_map/{scope}" stack_frame_id=3}}')
    return f"  %{name} = f32[4]{{0}} {opcode}({operands}){''.join(', ' + p for p in parts)}"


TEXT = "\n".join(
    [
        "HloModule jit_f, is_scheduled=true, num_partitions=4",
        "",
        "%fused (p: f32[4]) -> f32[4] {",
        line("inner.1", "multiply", "%p, %p", "transpose(jvp(layer))/mul"),
        line("inner.2", "add", "%inner.1, %p", "transpose(jvp(layer))/mul"),
        line("inner.3", "add", "%inner.1, %p", "jvp(layer)/mul"),
        "}",
        "",
        "%spread (p: f32[4]) -> f32[4] {",
        line("part", "all-reduce", "%p", "all_reduce_gradients/bucket_0/psum"),
        line("product", "convolution", "%p, %p", "transpose(jvp())/dot_general"),
        "}",
        "",
        "%branch (p: f32[4]) -> f32[4] {",
        line("slow.1", "reduce-scatter", "%p", "cond/phase:slow/reduce_scatter"),
        line("inserted", "all-gather", "%slow.1"),
        "}",
        "",
        "%callee (p: f32[4]) -> f32[4] {",
        line("in_call", "add", "%p, %p", "jvp()/add"),
        "}",
        "",
        "%wrapped (p: f32[4]) -> f32[4] {",
        line("inner_permute", "collective-permute", "%p", "phase:round 0/ppermute"),
        "}",
        "",
        "ENTRY %main (p: f32[4]) -> f32[4] {",
        line("fusion.1", "fusion", "%p", "jvp(layer)/tanh", kind="kLoop", calls="%callee"),
        line("fusion.2", "fusion", "%p", kind="kLoop", calls="%fused"),
        line("copy.1", "copy", "%p"),
        line("adam", "fusion", "%p", "optimizer/mul", kind="kLoop", calls="%callee"),
        line("ar-start", "all-reduce-start", "%p", "all_reduce_gradients/bucket_1/psum"),
        line("ar-done", "all-reduce-done", "%ar-start"),
        line("spread.1", "fusion", "%p", "transpose(jvp())/dot_general", calls="%spread"),
        line("cond.1", "conditional", "%p", branch_computations="{%branch}"),
        line("call.1", "call", "%p", to_apply="%callee"),
        line("pp-start", "async-start", "%p", calls="%wrapped"),
        line("pp-done", "async-done", "%pp-start"),
        line("statistics", "all-reduce", "%p", "phase:*/psum"),
        line("tensor", "all-gather", "%p", "transpose(jvp())/dot_general"),
        line("to_host", "send", "%p", is_host_transfer="true"),
        "}",
    ]
)
