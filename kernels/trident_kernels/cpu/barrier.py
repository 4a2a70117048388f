"""A barrier for the threads of one kernel, emitted as LLVM IR; Linux on x86-64 only.

Who comes first looks for the others for some microseconds, as long as they usually take, and then sleeps
on a futex: where other processes want the cores too, a thread that only spins takes the core from the
one it waits for.

    word 0   how many have come, in all rounds; only grows
    word 1   how many may be asleep

Each side writes its own word before it reads the other's, in one total order, so that either the last
one to come sees the sleeper, or the sleeper sees that all have come (and the futex, which compares word 0
itself, does not sleep).
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from trident_kernels.cpu.simd import I32, I64, emitter, get_or_insert_function, types

WORDS = 2
FOR_EVER = 1 << 62  # as patience

_SPINS = 1000  # looks before sleeping; a look with its pause is some 50 cycles
_SYS_FUTEX, _WAIT_PRIVATE, _WAKE_PRIVATE = 202, 128, 129
_NAP = 10_000_000  # nanoseconds of one sleep at most
_I8_PTR = ir.IntType(8).as_pointer()


def is_available() -> bool:
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def _futex(builder: Any, address: Any, operation: int, value: Any, timeout: Any) -> None:
    kind = ir.FunctionType(I64, [I64, _I8_PTR, I64, I64, _I8_PTR])
    call = get_or_insert_function(builder.module, kind, "syscall")
    where, until = builder.bitcast(address, _I8_PTR), builder.bitcast(timeout, _I8_PTR)
    builder.call(call, [I64(_SYS_FUTEX), where, I64(operation), value, until])


@emitter
def meet(typing: Any, words: Any, target: Any, patience: Any) -> Any:
    """Comes to the barrier at the pointer to int64 [WORDS], then waits until `target` have come.

    What each has written before is seen by all after it. Sleeps at most `patience` times 10 ms;
    returns 1 if it met the others, else 0.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, wanted, naps_left = args
        sleepers = builder.gep(pointer, [I64(1)])
        nap = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))  # type: ignore[no-untyped-call]
        builder.store(ir.Constant(nap.type.pointee, [I64(0), I64(_NAP)]), nap)
        nobody = ir.Constant(_I8_PTR, None)
        blocks = ("wake", "last", "look", "spin", "sleep", "slept", "after")
        wake, last, look, spin, sleep, slept, after = map(builder.append_basic_block, blocks)

        before = builder.atomic_rmw("add", pointer, I64(1), "seq_cst")
        come = builder.add(before, I64(1))
        builder.cbranch(builder.icmp_signed(">=", come, wanted), last, look)
        entry = builder.block

        builder.position_at_end(last)
        asleep = builder.load_atomic(sleepers, "seq_cst", 8)
        builder.cbranch(builder.icmp_signed(">", asleep, I64(0)), wake, after)
        builder.position_at_end(wake)
        _futex(builder, pointer, _WAKE_PRIVATE, I64(1 << 30), nobody)
        builder.branch(after)

        builder.position_at_end(look)
        spins, naps = builder.phi(I64), builder.phi(I64)
        seen = builder.load_atomic(pointer, "acquire", 8)
        builder.cbranch(builder.icmp_signed(">=", seen, wanted), after, spin)

        builder.position_at_end(spin)
        nothing = ir.FunctionType(ir.VoidType(), [])
        builder.call(get_or_insert_function(builder.module, nothing, "llvm.x86.sse2.pause"), [])
        more = builder.add(spins, I64(1))
        builder.cbranch(builder.icmp_signed("<", more, I64(_SPINS)), look, sleep)

        builder.position_at_end(sleep)
        builder.atomic_rmw("add", sleepers, I64(1), "seq_cst")
        again = builder.load_atomic(pointer, "seq_cst", 8)
        # The futex sleeps only while the low half of the word is still what was seen here.
        low = builder.zext(builder.trunc(again, I32), I64)
        sleeping = builder.append_basic_block("sleeping")
        builder.cbranch(builder.icmp_signed(">=", again, wanted), slept, sleeping)
        builder.position_at_end(sleeping)
        _futex(builder, pointer, _WAIT_PRIVATE, low, nap)
        builder.branch(slept)

        builder.position_at_end(slept)
        builder.atomic_rmw("sub", sleepers, I64(1), "seq_cst")
        napped = builder.add(naps, I64(1))
        builder.cbranch(builder.icmp_signed("<", napped, naps_left), look, after)

        for phi, spun, after_nap in ((spins, more, I64(0)), (naps, naps, napped)):
            phi.add_incoming(I64(0), entry)
            phi.add_incoming(spun, spin)
            phi.add_incoming(after_nap, slept)
        builder.position_at_end(after)
        result = builder.phi(I64)
        for block, met in ((last, 1), (wake, 1), (look, 1), (slept, 0)):
            result.add_incoming(I64(met), block)
        return result

    return types.int64(words, types.int64, types.int64), codegen
