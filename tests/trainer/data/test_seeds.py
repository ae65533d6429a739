"""Seeds: one for each place of a run."""

from mopd_trainer.data.seeds import derived_seed


def test_no_two_places_share_a_seed() -> None:
    places = [(), (0,), (3,), (3, 0), (3, 0, 0), (0, 3), (3, 1), (1, 3)]
    seeds = [derived_seed(run, *place) for run in (0, 1) for place in places]
    assert len(set(seeds)) == len(seeds)


def test_a_place_has_the_same_seed_every_time() -> None:
    assert derived_seed(7, 2, 5) == derived_seed(7, 2, 5)
