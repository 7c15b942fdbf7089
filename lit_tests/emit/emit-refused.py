# RUN: %python %s | %filecheck %s
"""tw.emit refuses illegal arguments with one line."""

import tilelang.language as T

import tileweave as tw
from tests.verdicts import print_verdict
from tileweave import language as W


@T.prim_func
def program(F: W.Symmetric((8,), "uint32")):
    with T.Kernel(1, threads=32):
        W.signal(F[0, 0])


def refused(name, *args, **kwargs):
    with print_verdict(name):
        tw.emit(*args, **kwargs)


# CHECK: stage: emit: stage='sass'; expected 'tile' or 'device' or 'cuda' or 'ptx'
refused("stage", program, stage="sass")
# CHECK: object: emit: 7; expected a T.prim_func
refused("object", 7)
# CHECK: size: emit: world_size=0; expected at least 1
refused("size", program, world_size=0)
# CHECK: arch: emit: arch='90'; expected 'sm_80', 'sm_90a', 'sm_100a'
refused("arch", program, arch="90")
