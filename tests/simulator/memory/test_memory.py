"""Order of accesses in the simulator's memory: faults and their kinds."""

from tests.simulator.memory.world import World, kind_of


def test_a_pair_of_read_and_write_is_called_the_same_whichever_comes_first():
    for read, written, kind in ((0, 0, "race"), (1, 0, "race"), (0, 1, "reuse")):
        world = World()
        world.load((1, 0), epoch=read)
        assert kind_of(lambda w=world, e=written: w.store((0, 0), epoch=e)) == kind
        world = World()
        world.store((0, 0), epoch=written)
        assert kind_of(lambda w=world, e=read: w.load((1, 0), epoch=e)) == kind


def test_overwriting_what_was_read_in_the_same_launch_is_reuse():
    world = World()
    world.store((1, 0))
    world.load((1, 0))
    world.blocks[1, 0].barrier((0, 1))
    world.release((1, 0))
    world.acquire((0, 0))
    world.load((1, 0))
    assert kind_of(lambda: world.store((0, 0))) == "reuse"


def test_every_reader_counts_not_only_the_last():
    world = World()
    world.load((1, 0))
    world.load((0, 1))
    world.blocks[0, 1].barrier((0, 1))
    world.release((0, 1))
    world.acquire((0, 0))
    assert kind_of(lambda: world.store((0, 0), epoch=1)) == "reuse"
