"""The sections about many clients can be written, and the scripts behind them run, in small."""

from experiments.scale import flower_clients, heterogeneity, way_down
from experiments.scale import sections as many_clients

from bqsgd._src.tasks.named import preset, settings_of


def test_each_section_can_be_written():
    row = {
        "clients": 1000, "asked": 100, "rounds": 10, "down_bits": 4, "peak_mib": 513.6, "times_gradients": 1.148,
        "bytes_up_per_frame": 60935, "bytes_down_per_frame": 246856,
        "seconds_by_stage": {"gradients": 9.0, "other": 1.0}, "wall_seconds": 10.0, "ledger_bytes": 794624, "load": 1.0,
    }  # fmt: skip
    assert "| 1,000 | 100 | 10 | 4 bits | 514 MiB | 1.15 | 60.9 kB | 246.9 kB |" in many_clients.clients(
        {"rows": [row]}
    )
    runs = [
        {"seed": 0, "down_bits": bits, "accuracy": 0.97, "bytes_down": down, "bytes_down_float32": 4000}
        for bits, down in ((None, 4000), (7, 900))
    ]
    means = {"whole": 0.97, "7": 0.97}
    found = {"means": means, "points_from_whole": {"whole": 0.0, "7": 0.0}, "runs": runs}
    assert "| 7 bits | 97.00 % (97.00) | +0.00 points | 0.00 MB | 22 % |" in many_clients.way_down(found)
    run = {
        "settings": {"clients": 1000, "cohort": 100, "rounds": 2}, "frames": [100, 100], "rounds_in_ledgers": 200,
        "seconds_in_all": 61.4, "seconds_by_round": [9.0, 4.4], "seconds_in_one_process": 8.0, "load": 2.0,
        "same_model_as_in_one_process": True, "peak_mib": 1536, "bytes_up": 200_000,
    }  # fmt: skip
    both = many_clients.flower_clients({"plain": run, "secure": run})
    assert "| secure sums | 200 | 61 s | 4 s | 8 s | 1.5 GiB | 1.0 kB | yes, bit for bit |" in both
    differ = {"shares": "equal sizes", "weights": "equal", "seed": 0, "accuracy": 0.852, "sizes": [300, 300, 300]}
    found = {"clients": 200, "cohort": 20, "rounds": 30, "runs": [differ]}
    assert "| equal sizes | 300, 300, 300 | 85.2 % | - | - |" in many_clients.heterogeneity(found)


def test_the_settings_of_the_runs_are_settings():
    for settings in (preset("mnist-users"), flower_clients.SETTINGS | {"clients": 1000, "cohort": 100, "rounds": 5}):
        settings_of(**settings)
    _, users = settings_of(**preset("mnist-users"))
    assert (users.privacy.unit, users.secure.on, users.clients.count) == ("client", True, 1000)
    assert users.privacy.mechanism is None
    assert way_down.SEEDS == (0, 1, 2)


def test_shares_of_different_sizes(monkeypatch):
    monkeypatch.setattr(heterogeneity, "CLIENTS", 20)
    digits = heterogeneity.data.load("digits")
    monkeypatch.setattr(heterogeneity.data, "load", lambda name: digits)
    held = heterogeneity.shares("sizes", 0)
    sizes = [len(labels) for _, labels in held]
    assert len(digits.train) / 2 < sum(sizes) < len(digits.train)
    assert min(sizes) >= 8
    assert max(sizes) > 2 * min(sizes)
    assert [heterogeneity._size(samples) for samples in (2, 3, 4, 5, 8, 11, 12, 300)] == [2, 2, 4, 4, 8, 8, 11, 256]
