"""Cards that users describe in a TOML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from vramfit.errors import UnknownGpuError, UsageError
from vramfit.gpus import GpuKind, find_gpu
from vramfit.gpus.card_file import link_rate
from vramfit.units import GIB, MIB

COMPLETE = """
name = "Modded 4090"
total_bytes = "47.5GiB"
compute_capability = "8.9"
sm_count = 128
l2_bytes = "72MiB"
bandwidth_gbs = 1008
memory_bus_bits = 384
boost_clock_mhz = 2520
link = "PCIe 4.0 x16"
peak_tflops = { float32 = 82.6, float16 = 165.2 }
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "card.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_complete_description(tmp_path: Path) -> None:
    card = find_gpu(write(tmp_path, COMPLETE))
    assert card.name == card.vendor_name == "Modded 4090"
    assert card.total_bytes == 47.5 * GIB
    assert card.compute_capability == (8, 9)
    assert card.architecture == "Ada"
    assert card.l2_bytes == 72 * MIB
    assert card.bandwidth == 1008e9
    assert card.boost_clock == 2520e6
    assert card.peak_flops == {"float32": 82.6e12, "float16": 165.2e12}
    assert card.host_link == pytest.approx(31.5e9, rel=0.01)
    assert card.kind is GpuKind.GENERIC
    assert card.context_bytes is None
    assert "card.toml" in card.source


def test_a_base_gives_what_is_left_out(tmp_path: Path) -> None:
    base = find_gpu("RTX 3090")
    card = find_gpu(write(tmp_path, 'base = "3090"\nname = "Mine"\ntotal_bytes = "20GiB"'))
    assert (card.name, card.total_bytes) == ("Mine", 20 * GIB)
    assert card.memory_source.endswith("card.toml")
    assert card.sm_count == base.sm_count
    assert card.peak_flops == base.peak_flops
    assert card.context_bytes == base.context_bytes
    assert card.vendor_name == base.vendor_name
    assert card.aliases == ()
    assert card.price is None


def test_a_base_may_be_another_generation(tmp_path: Path) -> None:
    text = 'base = "H100"\ncompute_capability = "10.0"\nlink = "PCIe 3.0 x8"\nbandwidth_gbs = 4000.5'
    card = find_gpu(write(tmp_path, text))
    assert card.architecture == "Blackwell"
    assert card.host_link == pytest.approx(7.88e9)
    assert card.bandwidth == 4000.5e9
    assert card.name.startswith("H100 SXM (")


def test_everything_a_file_may_say(tmp_path: Path) -> None:
    extra = """
aliases = ["big"]
vendor_name = "NVIDIA GeForce RTX 4090"
kind = "desktop"
architecture = "Ada"
memory_estimated = true
memory_source = "a guess"
host_link_gbs = 25.5
context_bytes = "400MiB"
context_source = "nvidia-smi"
integrated = false
source = "me"
notes = "soldered"
price = { value = 2500, unit = "USD", date = 2025-03-01, source = "a shop" }
"""
    card = find_gpu(write(tmp_path, COMPLETE + extra))
    assert card.aliases == ("big",)
    assert card.memory_estimated
    assert card.host_link == 25.5e9
    assert card.context_bytes == 400 * MIB
    assert card.price is not None
    assert card.price.date == "2025-03-01"
    assert card.source == "me"


def replaced(key: str, value: str) -> str:
    lines = [f"{key} = {value}" if line.startswith(f"{key} =") else line for line in COMPLETE.splitlines()]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('name = "x"', "missing total_bytes, compute_capability, sm_count"),
        (COMPLETE + "speed = 3", "unknown key 'speed'"),
        (replaced("name", '""'), "name must be text"),
        (replaced("total_bytes", '"a lot"'), "total_bytes: 'a lot' is not a size"),
        (replaced("total_bytes", "-1"), "total_bytes must be a positive whole number"),
        (replaced("total_bytes", "1.5"), "total_bytes must be a positive whole number"),
        (replaced("compute_capability", "8.9"), "compute_capability must be text"),
        (replaced("compute_capability", '"99.9"'), "compute_capability must be text and one of"),
        (replaced("sm_count", "true"), "sm_count must be a positive whole number"),
        (replaced("sm_count", '"128"'), "sm_count must be a positive whole number"),
        (replaced("bandwidth_gbs", "0"), "bandwidth_gbs must be a positive number"),
        (replaced("bandwidth_gbs", "inf"), "bandwidth_gbs must be a positive number"),
        (replaced("bandwidth_gbs", "1e300"), "bandwidth_gbs must be a positive number"),
        (replaced("peak_tflops", "{}"), "peak_tflops must be a table"),
        (replaced("boost_clock_mhz", "nan"), "boost_clock_mhz must be a positive number"),
        (replaced("link", '"a cable"'), "link must be like"),
        (replaced("peak_tflops", "3"), "peak_tflops must be a table"),
        (replaced("peak_tflops", "{ float12 = 1 }"), "peak_tflops.float12 is not a known dtype"),
        (replaced("peak_tflops", '{ float32 = "fast" }'), "peak_tflops.float32 must be a positive number"),
        (COMPLETE + 'aliases = "x"', "aliases must be a list"),
        (COMPLETE + "aliases = [1]", "aliases must be text"),
        (COMPLETE + 'kind = "toaster"', "kind must be one of desktop"),
        (COMPLETE + "integrated = 1", "integrated must be true or false"),
        (COMPLETE + "price = 3", "price must be a table"),
        (
            COMPLETE + 'price = { value = 1, unit = "EUR", date = "2025", source = "s" }',
            'price.unit must be "USD"',
        ),
        (COMPLETE + "price = { value = 1 }", "price must be a table with value, unit, date and source"),
        ("base = 3", "base must be text"),
        ('base = "RTX 4090"\nspeed = 3', "unknown key 'speed'"),
    ],
)
def test_a_fault_is_named_in_one_line(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu(write(tmp_path, text))
    message = str(caught.value)
    assert fault in message
    assert "card.toml" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("memory", "total_bytes"),
        ("Memory", "total_bytes"),
        ("total_byte", "total_bytes"),
        ("bandwidth", "bandwidth_gbs"),
        ("boost_clock", "boost_clock_mhz"),
        ("peak_flops", "peak_tflops"),
        ("Base", "base"),
    ],
)
def test_an_unknown_key_names_the_nearest(tmp_path: Path, key: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_gpu(write(tmp_path, f'base = "RTX 4090"\n{key} = "24GiB"'))
    assert caught.value.message.endswith(f"unknown key {key!r}: did you mean {meant!r}?")
    assert len(caught.value.message) < 120 + len(str(tmp_path))


def test_an_unknown_base_suggests(tmp_path: Path) -> None:
    with pytest.raises(UnknownGpuError, match="RTX 4090"):
        find_gpu(write(tmp_path, 'base = "RTX 4091"'))


def test_what_is_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not TOML"):
        find_gpu(write(tmp_path, "name = "))


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "card.toml"
    path.write_bytes(b"name = '\xff\xfe'")
    with pytest.raises(UsageError, match="is not UTF-8"):
        find_gpu(str(path))


def test_a_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    with pytest.raises(UsageError, match="cannot read the card file"):
        find_gpu(str(folder))


@pytest.mark.parametrize(
    ("link", "gigabytes"),
    [("PCIe 3.0 x16", 15.8), ("PCIe 4.0 x8", 15.8), ("PCIe 5.0 x16", 63.0), ("PCIe 6.0 x16", 121.0)],
)
def test_link_rates(link: str, gigabytes: float) -> None:
    assert link_rate(link, bandwidth=1e12) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_links_that_are_not_pcie() -> None:
    assert link_rate("NVLink-C2C", bandwidth=4e12) == 450e9
    assert link_rate("unified memory", bandwidth=273e9) == 273e9


def test_nvlink_in_words(tmp_path: Path) -> None:
    card = find_gpu(write(tmp_path, f'{COMPLETE}nvlink = "NVLink 4 x18"\n'))
    assert card.nvlink is not None
    assert (card.nvlink.generation, card.nvlink.links, card.nvlink.bridged) == (4, 18, False)
    assert card.nvlink.bandwidth == 450e9
    assert str(card.nvlink) == "NVLink 4 x18"
    cut = find_gpu(
        write(tmp_path, 'base = "A100 SXM 80GB"\nnvlink = "NVLink 3 x8 bridge"\nnvlink_gbs = 190.0')
    )
    assert cut.nvlink is not None
    assert (cut.nvlink.bandwidth, cut.nvlink.bridged) == (190e9, True)
    assert str(cut.nvlink) == "NVLink 3 x8 bridge"
    assert find_gpu(write(tmp_path, 'base = "H100"\nnvlink = "none"')).nvlink is None
    assert find_gpu(write(tmp_path, 'base = "H100"\nname = "Mine"')).nvlink == find_gpu("H100").nvlink


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('nvlink = "NVLink 4"', 'nvlink must be like "NVLink 4 x18" or "NVLink 3 x4 bridge"'),
        ('nvlink = "NVLink 9 x4"', "nvlink must be like"),
        ('nvlink = "NVLink 4 x0"', "nvlink must be like"),
        ("nvlink_gbs = 25.0", "nvlink_gbs is the rate of an nvlink, which is not given"),
    ],
)
def test_nvlink_that_makes_no_sense(tmp_path: Path, line: str, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        find_gpu(write(tmp_path, f"{COMPLETE}{line}\n"))
