"""Private names of torch that TileWeave uses exist in the installed release, as it calls them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.fx_passes.micro_pipeline_tp
import torch.distributed._symmetric_memory
import torch.distributed.tensor.experimental._context_parallel._attention
from torch._subclasses.fake_tensor import FakeTensorMode

from tileweave.builtins.versions import unsupported_torch

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("builtins", "codegen", "ops", "passes", "runtime", "simulator", "tileweave")
UNDOCUMENTED = "torch.ops.symm_mem."
"""Names below it have no underscore, but torch does not document them."""


def returns(kind: type | tuple[type, ...], *arguments: Any) -> Callable[[Any], None]:
    """Return a check that calls a function, which must return a ``kind``."""

    def check(function: Any) -> None:
        assert isinstance(function(*arguments), kind)

    return check


def accepts(*arguments: Any, **options: Any) -> Callable[[Any], None]:
    """Return a check that a Python function accepts these arguments, without a call."""

    def check(function: Any) -> None:
        inspect.signature(function).bind(*arguments, **options)

    return check


def handles_attention(handlers: dict[Any, Any]) -> None:
    assert torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def schema(*names: str) -> Callable[[Any], None]:
    """Return a check that an operator has these arguments first; after ``*``, in any order."""
    star = names.index("*") if "*" in names else len(names)

    def check(operator: Any) -> None:
        declared = [argument.name for argument in operator._schema.arguments]
        assert declared[:star] == list(names[:star])
        assert set(names[star + 1 :]) <= set(declared)

    return check


def abstract(*names: str) -> Callable[[Any], None]:
    """Return a check of the abstract methods of a class."""

    def check(kind: Any) -> None:
        assert kind.__abstractmethods__ == {*names}

    return check


def stub(name: str, *parameters: str) -> Callable[[Any], None]:
    """Return a check of a function that only CUDA builds have: of its declaration in torch."""

    def check(_: Any) -> None:
        text = Path(torch.__file__).with_name("_C").joinpath("__init__.pyi").read_text()
        functions = {f.name: f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)}
        declared = functions[name].args.args
        assert [p.arg for p in declared] == list(parameters)

    return check


def fails_for_an_unknown_name(function: Any) -> None:
    with pytest.raises((RuntimeError, ValueError, KeyError)):
        function("no group has this name")


def shares_memory(construct: Any) -> None:
    memory = torch.arange(4, dtype=torch.int32)
    storage = construct(memory.data_ptr(), torch.device("cpu"), memory.nbytes)
    view = torch.empty(0, dtype=torch.int32).set_(storage, 1, (2,), (2,))
    assert view.tolist() == [1, 3]


def is_no_level(level: Any) -> None:
    assert level == -1


def parses(function: Any) -> None:
    (first, second) = function("tileweave::f(Tensor a, Tensor(b!) b) -> Tensor").arguments
    assert first.alias_info is None and second.alias_info.is_write
    assert [first.name, second.name] == ["a", "b"]


def asserts(function: Any) -> None:
    function(torch.tensor(True), "message")
    with pytest.raises(RuntimeError, match="message"):
        function(torch.tensor(False), "message")


def refuses(function: Callable[[torch.Tensor], Any]) -> Callable[[Any], None]:
    """Return a check of the error that fake tensors raise for a function of them."""

    def check(error: Any) -> None:
        with FakeTensorMode(), pytest.raises(error) as raised:
            function(torch.empty(4))
        assert "aten" in str(raised.value.func)

    return check


def has_attributes(*names: str) -> Callable[[Any], None]:
    def check(_: Any) -> None:
        handle = torch._C._distributed_c10d._SymmetricMemory
        assert all(hasattr(handle, name) for name in names)

    return check


_SCALED_MM = (
    "self", "mat2", "scale_a", "scale_b", "bias", "*", "out_dtype"
)  # fmt: skip
_FLASH_BACKWARD = (
    "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q",
    "max_k", "dropout_p", "is_causal", "rng_state", "unused", "*", "scale",
)  # fmt: skip

NAMES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "torch._C._autograd._profiler_enabled": ("ops/core/library.py", returns(bool)),
    "torch._C._construct_storage_from_data_pointer": ("runtime/host/heap.py", shares_memory),
    "torch._C._cuda_getCurrentStream": (
        "runtime/executor/recorded_calls.py",
        stub("_cuda_getCurrentStream", "device"),
    ),
    "torch._C._cuda_isCurrentStreamCapturing": (
        "runtime/executor/recorded_calls.py",
        stub("_cuda_isCurrentStreamCapturing"),
    ),
    "torch._C._functorch.TransformType.Grad": ("ops/core/library.py", lambda _: None),
    "torch._C._functorch.TransformType.Jvp": ("ops/core/library.py", lambda _: None),
    "torch._C._functorch.get_interpreter_stack": ("ops/core/library.py", returns(type(None))),
    "torch._C._functorch.is_functorch_wrapped_tensor": (
        "ops/core/library.py",
        lambda function: returns(bool)(lambda: function(torch.empty(0))),
    ),
    "torch._C._functorch.peek_interpreter_stack": ("ops/core/library.py", returns(type(None))),
    "torch._C._is_any_autocast_enabled": ("ops/core/library.py", returns(bool)),
    "torch._C._is_tracing": ("ops/core/library.py", returns(bool)),
    "torch._C._len_torch_dispatch_stack": ("ops/core/library.py", returns(int)),
    "torch._C._len_torch_function_stack": ("ops/core/library.py", returns(int)),
    "torch._C.parse_schema": ("ops/core/schema.py", parses),
    "torch._assert_async": ("ops/attention", asserts),
    "torch._inductor.config": ("tileweave/integrations/torch/passes.py", lambda _: None),
    "torch._inductor.config.patch": (
        "tileweave/integrations/torch/passes.py",
        accepts(post_grad_custom_post_pass=None),
    ),
    "torch._inductor.config.post_grad_custom_post_pass": (
        "tileweave/integrations/torch/passes.py",
        lambda value: returns(type(None))(lambda: value),
    ),
    "torch._inductor.config.post_grad_custom_pre_pass": (
        "tileweave/integrations/torch/passes.py",
        lambda value: returns(type(None))(lambda: value),
    ),
    "torch._inductor.custom_graph_pass": ("tileweave/integrations/torch", lambda _: None),
    "torch._inductor.custom_graph_pass.CustomGraphPass": (
        "tileweave/integrations/torch/passes.py",
        abstract("__call__", "uuid"),
    ),
    "torch._inductor.custom_graph_pass.get_hash_for_files": (
        "tileweave/integrations/torch/passes.py",
        returns(bytes, (__file__,)),
    ),
    "torch._inductor.fx_passes.micro_pipeline_tp.find_all_gather_patterns": (
        "tileweave/integrations/torch/reasons.py",
        returns(list, torch.fx.Graph()),
    ),
    "torch._inductor.fx_passes.micro_pipeline_tp.find_reduce_scatter_patterns": (
        "tileweave/integrations/torch/reasons.py",
        returns(list, torch.fx.Graph()),
    ),
    "torch._inductor.fx_passes.micro_pipeline_tp.micro_pipeline_tp_pass": (
        "tileweave/integrations/torch/passes.py",
        returns(type(None), torch.fx.Graph()),
    ),
    "torch._scaled_mm": (
        "ops/core/epilogue.py",
        lambda _: schema(*_SCALED_MM)(torch.ops.aten._scaled_mm.out),
    ),
    "torch._subclasses.fake_tensor.DataDependentOutputException": (
        "ops/preparation.py",
        refuses(lambda x: x.sum().item()),
    ),
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": (
        "ops/preparation.py",
        refuses(torch.nonzero),
    ),
    "torch._subclasses.fake_tensor.FakeTensorMode": (
        "ops/preparation.py",
        accepts(allow_non_fake_inputs=True),
    ),
    "torch._subclasses.fake_tensor.is_fake": ("ops/core/library.py", returns(bool, 1)),
    "torch.autograd.forward_ad._current_level": ("ops/core/library.py", is_no_level),
    "torch.cuda._sleep": ("runtime/host/measure.py", accepts(1)),
    "torch.distributed._symmetric_memory": (
        "runtime/host/memory.py",
        has_attributes("buffer_ptrs", "offset", "multicast_ptr"),
    ),
    "torch.distributed._symmetric_memory._maybe_convert_scalar_types_to_dtypes": (
        "tileweave/integrations/torch/gathers.py",
        returns(list, [15]),
    ),
    "torch.distributed._symmetric_memory.empty": (
        "runtime/host/memory.py",
        accepts(1, dtype=torch.uint8, device=torch.device("cpu")),
    ),
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group": (
        "tileweave/integrations/torch/layout.py",
        accepts("group"),
    ),
    "torch.distributed._symmetric_memory.is_symm_mem_enabled_for_group": (
        "tileweave/integrations/torch/layout.py",
        returns(bool, "group"),
    ),
    "torch.distributed._symmetric_memory.rendezvous": (
        "runtime/host/memory.py",
        accepts(torch.empty(0), None),
    ),
    "torch.distributed.distributed_c10d._get_default_store": ("runtime/host/group.py", accepts()),
    "torch.distributed.distributed_c10d._resolve_process_group": (
        "runtime/host/group_argument.py",
        fails_for_an_unknown_name,
    ),
    "torch.distributed.tensor.experimental._context_parallel._attention": (
        "tileweave/integrations/torch/context_parallel.py",
        lambda _: None,
    ),
    "torch.distributed.tensor.experimental._context_parallel._attention._cp_options": (
        "tileweave/integrations/torch/context_parallel.py",
        lambda options: returns(bool)(lambda: options.enable_load_balance),
    ),
    "torch.distributed.tensor.experimental._context_parallel._attention.custom_ops": (
        "tileweave/integrations/torch/context_parallel.py",
        handles_attention,
    ),
    "torch.ops._c10d_functional": (
        "tileweave/integrations/torch",
        lambda ops: schema("input", "group_size", "group_name")(ops.all_gather_into_tensor.default),
    ),
    "torch.ops.aten._flash_attention_backward": (
        "ops/attention/backward.py",
        lambda operator: schema(*_FLASH_BACKWARD)(operator.default),
    ),
    "torch.ops.symm_mem.fused_all_gather_matmul": (
        "tileweave/bench/gemm.py",
        lambda o: schema("A", "Bs", "gather_dim", "group_name", "*", "return_A")(o.default),
    ),
    "torch.ops.symm_mem.fused_matmul_reduce_scatter": (
        "tileweave/bench/gemm.py",
        lambda o: schema("A", "B", "reduce_op", "scatter_dim", "group_name")(o.default),
    ),
    "torch.utils._pytree.tree_leaves": ("ops/preparation.py", returns(list, {})),
    "torch.utils._pytree.tree_map_only": (
        "ops/preparation.py",
        returns(tuple, torch.Tensor, abs, ()),
    ),
}
"""Each private name, with the file or folder that uses it and the check of a call."""


def private_names(source: str) -> set[str]:
    """Return the full names of private attributes and modules of torch in a file."""
    tree, names = ast.parse(source), set()
    modules = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    modules[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    names.add(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                names.add(f"{node.module}.{alias.name}")
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            parts: list[str] = []
            while isinstance(node, ast.Attribute):
                parts.insert(0, node.attr)
                node = node.value
            if isinstance(node, ast.Name) and node.id in modules:
                names.add(".".join([modules[node.id], *parts]))
    return {name for name in names if _is_private(name)}


def _is_private(name: str) -> bool:
    if name == "torch._C":  # its names are listed
        return False
    return name.startswith(UNDOCUMENTED) or any(
        p.startswith("_") and not p.startswith("__") for p in name.split(".")
    )


def test_private_names_are_found():
    source = """
import torch, torch.distributed as dist
import torch.distributed._symmetric_memory as symm
from torch import _C as c
from torch.fx import _pytree
torch.cuda._sleep(1); dist.distributed_c10d._get_default_store().x; symm.empty(); c._x.y()
torch.ops.symm_mem.f(0); torch.zeros(1)._private; torch.__version__
"""
    assert private_names(source) == {
        "torch.cuda._sleep",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed._symmetric_memory",
        "torch.distributed._symmetric_memory.empty",
        "torch._C._x.y",
        "torch.fx._pytree",
        "torch.ops.symm_mem.f",
    }


def test_the_table_has_all_names():
    used: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            for name in private_names(file.read_text()):
                used.setdefault(name, []).append(str(file.relative_to(ROOT)))
    assert used.keys() == NAMES.keys()
    for name, (where, _) in NAMES.items():
        assert any(file.startswith(where) for file in used[name]), (name, used[name])


@pytest.mark.parametrize("name", NAMES)
def test_exists_as_it_is_called(name):
    _, check = NAMES[name]
    target: Any = torch
    for part in name.split(".")[1:]:
        if part.startswith("_cuda_") and torch.version.cuda is None:
            target = None  # builds without CUDA only declare it
        else:
            target = getattr(target, part)
    check(target)


def test_the_installed_torch_is_supported():
    assert not unsupported_torch(torch.__version__)
