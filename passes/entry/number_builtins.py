"""Mark each builtin call with a number and its thread index for TileLang's pipeline."""

from __future__ import annotations

from tvm import IRModule, tirx

from ..ir.marks import NumberedCall, is_required_of_each_thread, with_calls
from ..ir.origin import name_of
from ..ir.thread_sets import Block, ThreadSet, follow_threads
from ..ir.walk import effects_in, line_of, nodes_in, uses_tileweave


def number_builtins(mod: IRModule, calls: dict[int, NumberedCall]) -> IRModule:
    """Append a ``Mark`` to each builtin call with an effect.

    TileLang copies calls, gives the program's threads other indices in a larger block, and removes
    calls that it considers dead. The mark identifies a call afterwards.

    TileLang considers results equal in all threads if no operand contains the thread index. Only
    then does it insert barriers in branches on them. So waits and loads have no thread index.

    Args:
        calls: receives the builtins by number.

    Before: ``T.tileweave.signal(flag, 1, "u32", "add", "sys", "release")``
    After:  ``T.tileweave.signal(flag, 1, "u32", "add", "sys", "release", 7, tx, 128)``
    """
    functions = {}
    for name, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc) and uses_tileweave(func):
            func = func.with_body(_with_marks(func, calls))
        functions[name] = func
    return IRModule(functions, attrs=mod.attrs)


def _with_marks(func: tirx.PrimFunc, calls: dict[int, NumberedCall]) -> tirx.Stmt:
    divided = {
        call
        for loop in nodes_in(func.body, tirx.For)
        if loop.kind == tirx.ForKind.PARALLEL
        for call in effects_in(loop.body)
    }

    def visit(stmt: tirx.Stmt, threads: ThreadSet, block: Block | None) -> tirx.Stmt:
        if block is None or block.index is None:
            return stmt

        def append(call: tirx.Call) -> tirx.Call:
            number = len(calls)
            calls[number] = NumberedCall(name_of(call), line_of(stmt), threads)
            is_required = is_required_of_each_thread(call)
            extent = block.extents[0] if is_required and call not in divided else 0
            mark = [
                tirx.IntImm("int32", number),
                block.index if is_required else tirx.IntImm("int32", 0),
                tirx.IntImm("int32", extent),
            ]
            return tirx.Call(call.dtype, call.op, [*call.args, *mark], call.annotations)

        return with_calls(stmt, append)

    return follow_threads(func.body, visit)
