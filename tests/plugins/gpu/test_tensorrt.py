"""A TensorRT plugin on the device: it starts the kernels that the native executor starts, and they give the same bits.

TensorRT itself is not here (TensorRT for RTX does not run on an H200): the plugin class stands on a module in Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from plugins.core.plan import NO_ARG, Arg, Phase, Plan, Step
from plugins.core.plugin import get_plugin
from plugins.core.spec import TensorSpec
from plugins.core.tensorrt import fields, plugins_of
from tests.fake_tensorrt import FakeTensorRt
from tests.plugins.gpu.device import Operator, arch, kernel_of, spec_of

pytestmark = pytest.mark.gpu


def test_a_plugin_starts_the_steps_kernels() -> None:
    x = torch.randn(8, 7168, device="cuda").bfloat16()
    weight = (torch.randn(384, 7168, device="cuda") * 7168**-0.5).bfloat16()
    bias = torch.randn(384, device="cuda") * 0.01
    row_request = torch.zeros(8, dtype=torch.int32, device="cuda")
    attrs = {"top_k": 8, "routed_scaling_factor": 2.827, "norm_topk_prob": True}
    operator = Operator("moe_route", attrs, [x, weight, bias, row_request])
    expected = operator.run()
    assert operator.workspace is not None

    names = get_plugin("moe_route").inputs, [name.removesuffix("?") for name in get_plugin("moe_route").outputs]
    inputs, outputs = (
        tuple(Arg("arena", name, 0, spec_of(tensor)) for name, tensor in zip(some, tensors, strict=True))
        for some, tensors in zip(names, (operator.inputs, operator.outputs), strict=True)
    )
    scratch = Arg("arena", "workspace", 0, TensorSpec((operator.workspace.numel(),), "uint8"))
    step = Step("route", "moe_route", "decode", attrs, inputs, outputs, scratch, operator.launches)
    source = Step("source", "embed", "rows", {}, (NO_ARG, NO_ARG), inputs, NO_ARG, ())  # what writes the operands
    plan = Plan(1, 0, arch(), "bfloat16", 0, {}, {}, {"verify[8]": Phase("verify", 8, (source, step))})

    def start(found: Step, addresses: Sequence[int], stream: int) -> None:
        for launch in found.launches:
            kernel_of(launch).start(addresses, stream)

    trt = FakeTensorRt(lambda work: work())
    with plugins_of(trt, plan, ["verify[8]"], start):
        plugin = trt.creators["moe_route"].create_plugin("route", fields(trt, "verify[8]", "route"), None).clone()
    assert plugin.get_workspace_size([], []) == operator.workspace.numel()
    for tensor in (*operator.outputs, operator.workspace):
        tensor.view(torch.uint8).fill_(0xFF)
    addresses = [
        [tensor.data_ptr() for tensor in tensors] for tensors in ([x, weight, bias, row_request], operator.outputs)
    ]
    stream = torch.cuda.current_stream().cuda_stream
    plugin.attach_to_context(None).enqueue([], [], *addresses, operator.workspace.data_ptr(), stream)
    torch.cuda.synchronize()
    for found, wanted in zip(operator.outputs, expected, strict=True):
        assert torch.equal(found, wanted)
