"""What a machine is called in reports and in recorded results."""

from __future__ import annotations

from asv_benchmarks import machine


def test_processors_of_one_name_are_told_apart() -> None:
    told = "vendor_id\t: AuthenticAMD\ncpu family\t: {}\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nstepping\t: 1\n\n"
    names = [machine.named(told.format(family) * 2) for family in (25, 26)]
    assert names == ["AMD EPYC (family 25 model 2)", "AMD EPYC (family 26 model 2)"]
    assert "family" not in machine.named("") and machine.named("")


def test_a_machine_is_described_by_what_asv_asks_for() -> None:
    about = machine.device()
    assert set(about) == {"os", "arch", "cpu", "num_cpu", "ram"} and all(about.values())
    assert machine.describe()["cpu"].startswith(f"{about['cpu']}, ")
