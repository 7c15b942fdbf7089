"""Two ranks of the simulator's memory without programs."""

import random

import numpy as np

import tileweave as tw
from tileweave.simulator.memory.clock import Clock
from tileweave.simulator.memory.memory import Access, Memory, Tensor
from tileweave.simulator.memory.order import SYS, BlockOrder, Layout


class World:
    """Two ranks of two blocks, and a tensor that both can access."""

    def __init__(self):
        self.layout = Layout(2, {None: 2}, 2)
        self.memory = Memory(self.layout, random.Random(0))
        start = Clock.start(self.layout.count)
        self.blocks = {
            (r, b): BlockOrder.start(self.layout, r, b, start) for r in (0, 1) for b in (0, 1)
        }
        self.data = Tensor(self.memory, "data", (8,), np.dtype(np.int32), written=True)
        self.flag = Tensor(self.memory, "flag", (1,), np.dtype(np.int32), written=True)
        for tensor in (self.data, self.flag):
            tensor.give((Ellipsis,), 0)

    def access(self, order, thread_groups=(0, 1), scope=0, epoch=0):
        agent, time, view = order.actor(thread_groups)
        return Access(agent, time, view, scope, "access", "here:1", epoch)

    def store(self, place, value=1, thread_groups=(0, 1), epoch=0):
        self.data.write(
            (slice(0, 8),), value, self.access(self.blocks[place], thread_groups, epoch=epoch)
        )

    def load(self, place, thread_groups=(0, 1), epoch=0):
        access = self.access(self.blocks[place], thread_groups, epoch=epoch)
        return self.data.read((slice(0, 8),), access)[0]

    def release(self, place, level=SYS):
        order = self.blocks[place]
        access = self.access(order, (0,), level)
        self.flag.store_word((0,), 1, access, order.release(0, level))

    def acquire(self, place, level=SYS, thread_groups=(0, 1)):
        order = self.blocks[place]
        sync = self.flag.load_word((0,), self.access(order, thread_groups, level), True).sync
        order.acquire(thread_groups, sync, level)


def kind_of(action):
    try:
        action()
    except tw.SimulationError as error:
        return error.kind
    return None
