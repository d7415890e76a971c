"""Time in which nobody could be heard does not count."""

from gradserve_server.runtime.event_loop import ServiceClock


class World:
    def __init__(self) -> None:
        self.now = 500.0
        self.clock = ServiceClock(lambda: self.now, longest_tick=5.0)
        self.start = self.clock()

    @property
    def seen(self) -> float:
        return self.clock() - self.start


def test_it_goes_with_the_other_clock_while_the_server_is_awake() -> None:
    world = World()
    for second in range(1, 100):
        world.now += 1
        assert world.seen == second
        world.clock.tick()
        assert world.seen == second


def test_a_suspension_counts_as_the_longest_tick() -> None:
    world = World()
    world.now += 1
    world.clock.tick()
    world.now += 3600
    assert world.seen == 6
    world.clock.tick()
    assert world.seen == 6
    world.now += 2
    assert world.seen == 8


def test_it_never_goes_back() -> None:
    world = World()
    last = world.seen
    for step, ticks in [(0.5, True), (4.9, False), (3, False), (100, True), (0.0, True), (7, True), (1, False)]:
        world.now += step
        assert world.seen >= last
        last = world.seen
        if ticks:
            world.clock.tick()
            assert world.seen >= last
            last = world.seen
