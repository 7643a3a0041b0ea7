"""The controller of draft lengths, with simulated texts and machines."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from torch_mesh.speculation.controller import Controller
from torch_mesh.speculation.lookup import Lookup

LENGTHS = (3, 7, 15)


class Machine:
    """A simulated machine. A forward takes 1 for one row and ``per_row`` for each further row. A drafted token is right
    with probability ``right``."""

    def __init__(self, right: float, per_row: float, seed: int, noise: float = 0.0) -> None:
        self.right, self.per_row, self.noise = right, per_row, noise
        self.random = random.Random(seed)
        self.seconds = 0.0
        self.tokens = 0
        self.chosen: list[int] = []

    def run(self, controller: Controller, steps: int, matches: float = 1.0, tier: int = 0) -> None:
        for _ in range(steps):
            length = controller.choose(15, tier) if self.random.random() < matches else 0
            accepted = next((i for i in range(length) if self.random.random() >= self.right), length)
            seconds = (1 + self.per_row * length) * (1 + self.noise * self.random.random())
            controller.observe(length, accepted, seconds, tier)
            self.seconds += seconds
            self.tokens += accepted + 1
            self.chosen.append(length)

    @property
    def slower(self) -> float:
        """The time relative to plain decoding of the same tokens."""
        return self.seconds / (self.tokens * (1 + self.noise / 2))


@pytest.mark.parametrize("per_row", [0.2, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("right", [0.0, 0.1, 0.5])
def test_drafts_that_do_not_pay_cost_at_most_a_twentieth(right: float, per_row: float, seed: int) -> None:
    machine = Machine(right, per_row, seed, noise=0.2)
    controller = Controller(LENGTHS)
    for steps in (100, 300, 4000):
        machine.run(controller, steps)
        one_trial = 1.2 * (1 + per_row * 3)  # a trial may begin just before the allowed loss is used up
        assert machine.slower < 1.05 + 0.01 + one_trial / machine.tokens
    assert machine.slower < 1.05


@pytest.mark.parametrize("right,per_row,best", [(1.0, 0.1, 15), (0.95, 0.05, 15), (0.8, 0.3, 3)])
def test_the_best_draft_length_is_found_and_kept(right: float, per_row: float, best: int, seed: int) -> None:
    machine = Machine(right, per_row, seed)
    controller = Controller(LENGTHS)
    machine.run(controller, 300)
    utility = {
        length: sum(right**i for i in range(length + 1)) / (1 + per_row * length) for length in LENGTHS
    }  # accepted tokens are geometrically distributed
    assert max(utility, key=utility.__getitem__) == best
    machine.chosen.clear()
    machine.seconds, machine.tokens = 0.0, 0
    machine.run(controller, 500)
    assert 1 / machine.slower > max(0.75 * utility[best], 1)
    assert {0, best} < set(machine.chosen), "plain decoding and other lengths are measured again now and then"


def test_failed_trials_are_repeated_less_and_less_often(seed: int) -> None:
    machine = Machine(0.0, 0.01, seed)  # trials cost so little that cost is no reason to wait
    controller = Controller(LENGTHS)
    machine.run(controller, 3000)
    drafted = [place for place, length in enumerate(machine.chosen) if length > 0]
    gaps = [after - before for before, after in itertools.pairwise(drafted) if after - before > 1]
    assert all(after >= 1.5 * before for before, after in itertools.pairwise(gaps)) and len(gaps) >= 4
    controller.begin()
    assert controller.choose(15) > 0, "another text is tried at once"


def test_a_text_that_changes_is_noticed(seed: int) -> None:
    machine = Machine(0.0, 0.3, seed)
    controller = Controller(LENGTHS)
    machine.run(controller, 300)
    assert machine.chosen.count(0) > 270
    machine.right = 1.0
    machine.run(controller, 600)
    assert machine.chosen[-50:].count(0) < 5
    machine.right = 0.0
    machine.run(controller, 100)
    assert machine.chosen[-50:].count(0) > 40


def test_a_gain_on_one_text_is_not_lost_on_the_next(seed: int) -> None:
    machine = Machine(1.0, 0.2, seed)
    controller = Controller(LENGTHS)
    machine.run(controller, 200)
    controller.begin()
    machine.right = 0.0
    machine.seconds, machine.tokens = 0.0, 0
    machine.run(controller, 100)
    one_draft = 0.2 * 15  # a draft may begin just before the allowed loss is used up
    assert machine.seconds - machine.tokens < 0.05 * 100 + one_draft


def test_gains_below_the_bias_of_measuring_are_not_taken(seed: int) -> None:
    machine = Machine(1.0, 0.96, seed)  # gives 1.03 to 1.04 times plain decoding's speed
    machine.run(Controller(LENGTHS), 1000)
    assert machine.chosen.count(0) > 900


def test_the_same_observations_lead_to_the_same_choices(seed: int) -> None:
    runs = []
    for _ in range(2):
        machine = Machine(0.7, 0.2, seed, noise=0.5)
        machine.run(Controller(LENGTHS), 500, matches=0.6)
        runs.append(machine.chosen)
    assert runs[0] == runs[1]


def test_draft_lengths_respect_the_remaining_room(seed: int) -> None:
    machine = Machine(1.0, 0.0, seed)
    controller = Controller(LENGTHS)
    machine.run(controller, 100)
    assert controller.choose(15) == 15
    assert [controller.choose(most) for most in (14, 7, 6, 3, 2, 0, -5)] == [7, 7, 3, 3, 0, 0, 0]


def test_a_single_slow_forward_changes_little(seed: int) -> None:
    machine = Machine(1.0, 0.2, seed)
    controller = Controller(LENGTHS)
    machine.run(controller, 200)
    controller.observe(15, 15, 1e4)
    controller.observe(0, 0, 1e4)
    machine.chosen.clear()
    machine.run(controller, 400)
    assert machine.chosen[-100:].count(15) > 80


def test_failed_short_drafts_do_not_stop_long_ones_that_pay() -> None:
    controller = Controller(LENGTHS)
    for _ in range(8):
        controller.observe(0, 0, 1.0)
        controller.observe(3, 3, 3.9)
        controller.observe(7, 7, 7.9)
        controller.observe(15, 15, 8.0)
    for _ in range(8):
        controller.observe(3, 0, 3.9)
        controller.observe(15, 15, 8.0)
    assert controller.utilities()[3] < 1 < controller.utilities()[15]
    assert controller.choose(5) == 0 and controller.choose(15) == 15


@pytest.mark.parametrize("tier", [1, 2, 3])
@pytest.mark.parametrize("right", [0.0, 0.95])
def test_drafts_are_judged_by_confidence_tier(right: float, tier: int, seed: int) -> None:
    machine, controller = Machine(0.9, 0.2, seed), Controller(LENGTHS)
    chosen: dict[int, list[int]] = {each: [] for each in range(tier + 1)}
    for step in range(2000 * (tier + 1)):
        each = step % (tier + 1)
        machine.right = right if each == tier else 0.9
        machine.run(controller, 1, tier=each)
        chosen[each].append(machine.chosen[-1])
    *sure, drafted = (statistics.fmean(map(bool, lengths)) for lengths in chosen.values())
    assert min(sure) > 0.75, "what sure drafts bring is not hidden"
    assert drafted < 0.1 if right == 0 else drafted > 0.75


@pytest.mark.parametrize("tier", [1, 2, 3])
def test_a_lower_confidence_tier_is_not_tried_where_a_higher_one_fails(tier: int, seed: int) -> None:
    machine, controller = Machine(0.0, 0.1, seed), Controller(LENGTHS)
    while not machine.chosen or any(machine.chosen[-300:]):
        machine.run(controller, 300)
    machine.right = 1.0
    machine.run(controller, 150, tier=tier)  # in which drafts of tier 0 wait for 512 or 1024 forwards
    assert not any(machine.chosen[-150:])
    controller.begin()
    machine.run(controller, 300, tier=tier)
    assert any(machine.chosen[-300:]), "nothing is known of another text"


def test_a_failed_tier_is_abandoned_without_further_drafts_of_it(seed: int) -> None:
    machine, controller = Machine(0.0, 0.1, seed), Controller(LENGTHS)
    while sum(map(bool, machine.chosen)) < 3:
        machine.run(controller, 1)
    assert max(controller.utilities().values()) < 1
    machine.right = 1.0
    machine.run(controller, 100, tier=1)
    assert not any(machine.chosen[-100:-90]) and any(machine.chosen[-50:])


def test_a_lower_confidence_tier_is_tried_only_after_a_gain(seed: int) -> None:
    machine, controller = Machine(1.0, 0.2, seed), Controller(LENGTHS)
    machine.run(controller, 40)
    controller.begin()
    machine.run(controller, 1, tier=2)
    assert machine.chosen[-1] == 0, "nothing is gained yet"
    machine.run(controller, 4, tier=1)
    assert machine.chosen[-4:] == [3, 3, 3, 7], "the first tier waits for no gain"
    machine.run(controller, 4, tier=2)
    assert machine.chosen[-4:] == [3, 3, 3, 7]
    controller.begin()
    machine.run(controller, 1, tier=2)
    assert machine.chosen[-1] > 0, "what pays waits for no gain"


def test_forwards_without_a_time_change_nothing() -> None:
    controller = Controller(LENGTHS)
    for _ in range(20):
        controller.observe(0, 0, None)
    assert controller.choose(15) == 0
    for _ in range(4):
        controller.observe(0, 0, 1.0)
    for _ in range(5):
        assert controller.choose(15) == 3
        controller.observe(3, 0, None)


def test_a_draft_continues_the_last_occurrence_of_the_longest_suffix(seed: int) -> None:
    text = random.Random(seed).choices(range(4), k=150)
    text += text[:50]
    lookup = Lookup(text[:50])
    tiers = set()
    for place in range(50, 200):
        expected: list[int] = []
        for size in (5, 4, 3, 2, 1):
            ends = [i for i in range(size, place) if text[i - size : i] == text[place - size : place]]
            if ends:
                source = list(text[:place])
                for i in range(7):  # after the end of the text the draft continues with its own tokens
                    source.append(source[ends[-1] + i])
                expected = source[place:]
                break
        before = list(zip(reversed(text[: ends[-1]]), reversed(text[:place]), strict=False)) if ends else []
        alike = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], before))
        assert lookup.tier == (sum(alike < bound for bound in (8, 3, 2)) if ends else 0)
        tiers.add(lookup.tier)
        assert list(lookup.draft(7)) == expected
        assert list(lookup.draft(3)) == expected[:3]
        lookup.extend([text[place]])
    assert {0, 1} <= tiers, "long endings and short ones"
    assert not Lookup([1, 2, 3]).draft(5) and not Lookup().draft(5)
