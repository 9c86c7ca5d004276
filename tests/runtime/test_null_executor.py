"""The null executor: a good plan passes; every corruption is found and named."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine_runtime.executor.null import PlanError, check_plan, check_ranks
from plugins.core.plan import NO_ARG, Arg, Phase, Plan
from plugins.core.spec import TensorSpec
from tests.runtime.plans import (
    HIDDEN,
    ROWS,
    VOCAB,
    arena,
    change_arg,
    change_step,
    find_step,
    small_plan,
)


def test_good_plan_passes_and_reports_what_it_does() -> None:
    small, large = check_plan(small_plan())
    assert (small.key, large.key) == ("verify[2]", "verify[4]")
    assert large.steps == 7
    assert large.writes == ("kv_pool", "logits", "sampled")
    assert large.arena_bytes == 2048 + 4 * ROWS * VOCAB
    assert large.collectives == (
        ("sum", "all_reduce", 4 * ROWS * HIDDEN),
        ("gather", "all_gather", 4 * ROWS * VOCAB),
    )
    assert large.argument_bytes == 8 * 17  # sample: sixteen inputs, one output


def drop_step(plan: Plan, node: str) -> Plan:
    phase = plan.phases["verify[4]"]
    steps = tuple(step for step in phase.steps if step.node != node)
    return replace(plan, phases={**plan.phases, "verify[4]": replace(phase, steps=steps)})


def swap_steps(plan: Plan, first: str, second: str) -> Plan:
    phase = plan.phases["verify[4]"]
    steps = list(phase.steps)
    i, j = (next(k for k, step in enumerate(steps) if step.node == node) for node in (first, second))
    steps[i], steps[j] = steps[j], steps[i]
    return replace(plan, phases={**plan.phases, "verify[4]": replace(phase, steps=tuple(steps))})


def move_value(plan: Plan, name: str, offset: int) -> Plan:
    """The value `name` at another arena offset, for its writer and its readers."""

    def moved(args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        return tuple(replace(a, offset=offset) if (a.kind, a.name) == ("arena", name) else a for a in args)

    phase = plan.phases["verify[4]"]
    steps = tuple(replace(s, inputs=moved(s.inputs), outputs=moved(s.outputs)) for s in phase.steps)
    return replace(plan, phases={**plan.phases, "verify[4]": replace(phase, steps=steps)})


def without(table: dict, name: str) -> dict:
    return {key: value for key, value in table.items() if key != name}


def attrs(plan: Plan, node: str, **changes: object) -> Plan:
    return change_step(plan, node, attrs={**find_step(plan, node).attrs, **changes})


CORRUPTIONS: list[tuple[str, Callable[[Plan], Plan], str]] = [
    ("unknown plugin", lambda p: change_step(p, "norm", plugin="layer_norm"), "'layer_norm' is not a plugin"),
    ("unknown tactic", lambda p: change_step(p, "norm", tactic="fast"), "tactic 'fast': expected one of"),
    (
        "too many inputs",
        lambda p: change_step(p, "norm", inputs=(*find_step(p, "norm").inputs, NO_ARG)),
        "expected at most 2 inputs, found 3",
    ),
    (
        "missing required operand",
        lambda p: change_step(p, "norm", inputs=find_step(p, "norm").inputs[:1]),
        "weight: a required operand is absent",
    ),
    (
        "absent required operand",
        lambda p: change_step(p, "norm", inputs=(NO_ARG, find_step(p, "norm").inputs[1])),
        "x: a required operand is absent",
    ),
    ("missing output", lambda p: change_step(p, "norm", outputs=()), "y: a required operand is absent"),
    ("missing attribute", lambda p: change_step(p, "norm", attrs={}), "attributes missing or unknown: eps"),
    ("extra attribute", lambda p: attrs(p, "norm", gain=1.0), "attributes missing or unknown: gain"),
    ("attribute kind", lambda p: attrs(p, "norm", eps=1), "attribute eps: expected float, found int"),
    ("boolean for int", lambda p: attrs(p, "sum", tp_world=True), "tp_world: expected int, found bool"),
    ("attribute value", lambda p: attrs(p, "head", activation="gelu"), "activation: expected one of"),
    (
        "beyond the arena",
        lambda p: replace(p, arena_bytes=2048 + 4 * ROWS * VOCAB - 1),
        "part|y: arena bytes 2048 to 2560 are outside the arena of 2559 bytes",
    ),
    ("negative offset", lambda p: move_value(p, "part", -256), "arena bytes -256 to"),
    ("misaligned", lambda p: move_value(p, "part", 2048 + 16), "2064 is not a multiple of 256"),
    (
        "unknown buffer",
        lambda p: change_arg(p, "embed", "inputs", 0, name="ids"),
        "tokens: the plan has no buffer 'ids'",
    ),
    (
        "buffer too small",
        lambda p: replace(p, buffers={**p.buffers, "tokens": TensorSpec((ROWS - 1,), "int32")}),
        "tokens: buffer 'tokens' is int32[3], the step sees more: int32[4]",
    ),
    (
        "buffer dtype",
        lambda p: replace(p, buffers={**p.buffers, "tokens": TensorSpec((ROWS,), "uint32")}),
        "tokens: buffer 'tokens' holds uint32, the step sees int32",
    ),
    ("unknown weight", lambda p: replace(p, weights=without(p.weights, "head")), "has no weight 'head'"),
    (
        "weight spec",
        lambda p: change_arg(p, "head", "inputs", 1, spec=TensorSpec((VOCAB, HIDDEN), "float32")),
        "weight 'head' is bfloat16[32,64], the step sees float32[32,64]",
    ),
    (
        "kind of address",
        lambda p: change_arg(p, "norm", "inputs", 0, kind="stack"),
        "unknown kind of address 'stack'",
    ),
    (
        "offset in a buffer",
        lambda p: change_arg(p, "embed", "inputs", 0, offset=4),
        "an offset (4) is only known in the arena",
    ),
    ("no shape", lambda p: change_arg(p, "norm", "inputs", 0, spec=None), "x: arena 's' has no shape"),
    (
        "empty shape",
        lambda p: change_arg(p, "norm", "inputs", 0, spec=TensorSpec((0, HIDDEN), "float32")),
        "is not a shape of positive sizes",
    ),
    (
        "read before written",
        lambda p: drop_step(p, "sum"),
        "x: the value 's' has not been written in this phase",
    ),
    ("order of steps", lambda p: swap_steps(p, "sum", "norm"), "the value 's' has not been written"),
    (
        "overwritten while alive",
        lambda p: move_value(p, "y", 1024),
        "y: overlaps x in arena bytes 1024 to 2048",
    ),
    (
        "overwritten before its reader",
        lambda p: change_arg(p, "head", "inputs", 0, name="x"),
        "x: the value 'x' was overwritten by step 'norm'",
    ),
    (
        "read where it is not",
        lambda p: change_arg(p, "norm", "inputs", 0, offset=2048),
        "x: the value 's' lies at bytes 1024 to 2048, read at 2048 to 3072",
    ),
    (
        "read more than written",
        lambda p: change_arg(p, "norm", "inputs", 0, spec=TensorSpec((ROWS + 1, HIDDEN), "float32")),
        "x: the value 's' lies at bytes 1024 to 2048, read at 1024 to 2304",
    ),
    (
        "output spec",
        lambda p: change_arg(p, "head", "outputs", 0, spec=TensorSpec((ROWS, VOCAB - 1), "float32")),
        "y: the operator gives float32[4,32], the plan holds float32[4,31]",
    ),
    (
        "result in a weight",
        lambda p: change_arg(p, "norm", "outputs", 0, kind="weight", name="norm"),
        "y: expected an arena or buffer address, found 'weight'",
    ),
    (
        "workspace over an input",
        lambda p: change_step(p, "head", workspace=arena("scratch", 256, 64)),
        "workspace: overlaps x in arena bytes 256 to 512",
    ),
    (
        "workspace over a later operand",
        lambda p: change_step(p, "embed", workspace=arena("scratch", 0, 64)),
        "overlaps",
    ),
    (
        "in place outside a buffer",
        lambda p: change_step(p, "compact", inputs=(*find_step(p, "compact").inputs[:4], arena("k", 0, 1, 8, 4))),
        "kv_pool: is written in place, expected a buffer, found arena",
    ),
]


@pytest.mark.parametrize(("corrupt", "sentence"), [c[1:] for c in CORRUPTIONS], ids=[c[0] for c in CORRUPTIONS])
def test_corruption_is_found_and_named(corrupt: Callable[[Plan], Plan], sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_plan(corrupt(small_plan()))
    message = str(caught.value)
    assert any(part in message for part in sentence.split("|")), message
    assert re.match(r"rank 0, verify\[[24]\], step '\w+' \(\w+\)", message), message


def test_two_outputs_in_one_place() -> None:
    plan = small_plan()
    both = find_step(plan, "sum")
    norm = Arg("weight", "norm", 0, plan.weights["norm"].spec)
    residual = arena("x", 0, ROWS, HIDDEN)
    same = change_step(plan, "sum", inputs=(*both.inputs, residual, norm), outputs=(*both.outputs, both.outputs[0]))
    with pytest.raises(PlanError, match="sum: overlaps normed"):
        check_plan(same)


def test_a_value_overwritten_by_a_workspace_is_lost() -> None:
    plan = small_plan()
    plan = change_step(plan, "norm", workspace=arena("scratch", 2304, 64))
    plan = move_value(plan, "part", 2048)
    check_plan(plan)  # part is written after the scratch was used
    with pytest.raises(PlanError, match="'part' was overwritten by step 'late'"):
        late = replace(find_step(plan, "norm"), node="late", inputs=(arena("y", 0, ROWS, HIDDEN),) * 1)
        late = replace(late, inputs=(*late.inputs, find_step(plan, "norm").inputs[1]))
        late = replace(late, outputs=(arena("z", 1024, ROWS, HIDDEN),))
        phase = plan.phases["verify[4]"]
        at = [step.node for step in phase.steps].index("gather")
        steps = (*phase.steps[:at], late, *phase.steps[at:])
        check_plan(replace(plan, phases={"verify[4]": replace(phase, steps=steps)}))


def test_all_ranks_of_a_good_engine() -> None:
    reports = check_ranks([small_plan(4, rank) for rank in range(4)])
    assert [report.key for report in reports] == ["verify[2]", "verify[4]"]


RANK_CORRUPTIONS: list[tuple[str, Callable[[Plan], Plan], str]] = [
    ("wrong rank", lambda p: replace(p, rank=0), "rank 1 of 2: the plan is of rank 0 of 2"),
    ("wrong tp", lambda p: replace(p, tp=4), "the plan is of rank 1 of 4"),
    ("arena", lambda p: replace(p, arena_bytes=8192), "rank 1: arena_bytes differs"),
    ("dtype", lambda p: replace(p, activation_dtype="bfloat16"), "rank 1: activation_dtype differs"),
    (
        "phases",
        lambda p: replace(p, phases=without(p.phases, "verify[2]")),
        "phases differ from rank 0: verify[2]",
    ),
    ("weights", lambda p: replace(p, weights=without(p.weights, "norm")), "weights differ from rank 0: norm"),
    ("steps", lambda p: drop_step(p, "compact"), "rank 1, verify[4]: 6 steps, 7 on rank 0"),
    (
        "tactic",
        lambda p: change_step(p, "head", tactic="other"),
        "tactic 'other' here, 'reference' on rank 0",
    ),
    ("order", lambda p: swap_steps(p, "sum", "gather"), "step 'gather' (all_gather): node 'gather' here"),
    ("attribute", lambda p: attrs(p, "norm", eps=1e-6), "attribute eps is 1e-06 here, 1e-05 on rank 0"),
    (
        "address",
        lambda p: move_value(p, "part", 2304),
        "step 'head' (dense_gemm): outputs differ from rank 0",
    ),
]


@pytest.mark.parametrize(
    ("corrupt", "sentence"), [c[1:] for c in RANK_CORRUPTIONS], ids=[c[0] for c in RANK_CORRUPTIONS]
)
def test_ranks_out_of_step_are_found(corrupt: Callable[[Plan], Plan], sentence: str) -> None:
    with pytest.raises(PlanError, match=re.escape(sentence)):
        check_ranks([small_plan(2, 0), corrupt(small_plan(2, 1))])


def test_tp_rank_may_differ_between_ranks() -> None:
    assert find_step(small_plan(2, 1), "embed").attrs["tp_rank"] == 1
    check_ranks([small_plan(2, 0), small_plan(2, 1)])


def test_a_model_of_full_size_is_walked_in_seconds() -> None:
    """8 ranks, 15 phases of 900 steps."""

    def deep(rank: int) -> Plan:
        plan = small_plan(8, rank)
        steps = plan.phases["verify[4]"].steps
        body = [replace(step, node=f"{step.node}.{layer}") for layer in range(129) for step in steps]
        phases = [Phase("verify", bucket, tuple(body)) for bucket in range(1, 16)]
        return replace(plan, phases={phase.key: phase for phase in phases})

    plans = [deep(rank) for rank in range(8)]
    start = time.perf_counter()
    reports = check_ranks(plans)
    assert len(reports) == 15 and reports[0].steps == 903
    assert time.perf_counter() - start < 20
