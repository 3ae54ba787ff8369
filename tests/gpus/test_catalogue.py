"""Every row of the catalogue: plausible figures, a source for each, names that do not collide."""

from __future__ import annotations

import re
from collections import Counter
from datetime import date

import pytest

from vramfit.gpus import GpuKind, GpuSpec, catalogue
from vramfit.gpus.card_file import ambiguous_names
from vramfit.units import GIB, MIB

CARDS = {card.name: card for card in catalogue()}
each_card = pytest.mark.parametrize("card", CARDS.values(), ids=CARDS.keys())

# Memory sizes on the box, in GiB.
NOMINAL_GIB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 72, 80, 94, 96, 128, 141, 144, 180, 186, 288)

# Dense operations that one SM does per clock, with float32 accumulation for half precision. Where NVIDIA
# sells chips of one capability with full and with halved tensor cores, both rates stand here. Sources: the
# Pascal, Volta, Turing, Ampere (A100, GA102), Ada, Hopper and Blackwell architecture whitepapers.
HALF_PER_SM_CLOCK = {
    (6, 0): (128,),
    (6, 1): (256,),
    (7, 0): (1024,),
    (7, 5): (256, 512, 1024),
    (8, 0): (2048,),
    (8, 6): (512, 1024),
    (8, 7): (2048,),
    (8, 9): (512, 1024),
    (9, 0): (4096,),
    (10, 0): (8192,),
    (10, 3): (8192,),
    (11, 0): (8192,),
    (12, 0): (512, 1024),
    (12, 1): (1024,),
}
FLOAT32_PER_SM_CLOCK = {(6, 0): 128, (6, 1): 256, (7, 0): 128, (7, 5): 128, (8, 0): 128}
# Sold with throughput cut far below what the silicon does, for export to China; not a multiple of its SMs.
CUT_DOWN = {"H20"}


def test_it_holds_the_cards_people_own_or_rent() -> None:
    assert len(CARDS) >= 100
    kinds = Counter(card.kind for card in CARDS.values())
    assert kinds[GpuKind.LAPTOP] >= 10
    assert kinds[GpuKind.EMBEDDED] >= 5
    assert kinds[GpuKind.DATACENTER] >= 25


def test_no_name_means_two_cards() -> None:
    names = [name.lower() for card in CARDS.values() for name in (card.name, *card.aliases)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_ambiguous_names_lead_to_cards() -> None:
    assert ambiguous_names()
    for name, cards in ambiguous_names().items():
        assert name not in CARDS
        assert len(cards) > 1
        assert set(cards) <= set(CARDS)


def test_only_known_cards_share_a_reported_name() -> None:
    shared = Counter(card.vendor_name for card in CARDS.values())
    assert {name for name, count in shared.items() if count > 1} == {
        "NVIDIA GeForce RTX 2060",
        "NVIDIA GeForce RTX 3050",
        "NVIDIA GeForce RTX 3080",
        "NVIDIA GeForce RTX 4060 Ti",
        "NVIDIA GeForce RTX 5060 Ti",
        "Orin",
    }


@each_card
def test_every_figure_has_a_source(card: GpuSpec) -> None:
    assert card.source.startswith(("NVIDIA", "Google", "AWS"))
    assert len(card.memory_source) > 10
    assert card.memory_estimated == card.memory_source.startswith("estimated: ")
    assert (card.context_bytes is None) == (card.context_source == "")


@each_card
def test_memory_is_a_little_less_than_on_the_box(card: GpuSpec) -> None:
    size = card.total_bytes / GIB
    assert any(0.90 * nominal <= size <= nominal for nominal in NOMINAL_GIB), size
    in_name = re.search(r"(\d+)GB", card.name)
    if in_name:
        assert 0.90 * int(in_name[1]) <= size <= int(in_name[1])


@each_card
def test_a_whole_number_of_mebibytes_or_bytes_in_the_source_is_the_figure(card: GpuSpec) -> None:
    """The first figure a memory source quotes is the one in the row."""
    exact = re.search(r"(\d{9,}) bytes", card.memory_source) or re.search(
        r"totalGlobalMem (\d+)", card.memory_source
    )
    whole = re.search(r"(\d{4,6}) ?(?:MB|MiB|MBytes)\b", card.memory_source)
    if card.memory_estimated:
        assert card.total_bytes % MIB == 0 or "estimated: as the" in card.memory_source
    elif exact and (whole is None or exact.start() < whole.start()):
        assert card.total_bytes == int(exact[1])
    elif whole and " GiB" not in card.memory_source[: whole.start()]:
        assert card.total_bytes // MIB == int(whole[1])
    else:
        decimals = re.search(r"(\d+\.\d+) (GiB|GB)", card.memory_source)
        assert decimals is not None
        unit = GIB if decimals[2] == "GiB" else 10**9
        assert card.total_bytes / unit == pytest.approx(float(decimals[1]), abs=0.051)


def test_an_estimate_as_another_card_is_that_cards_figure() -> None:
    copies = 0
    for card in CARDS.values():
        match = re.match(r"estimated: as the (.+?)(?:, which has the same memory)$", card.memory_source)
        if match:
            copies += 1
            assert card.total_bytes == CARDS[match[1]].total_bytes
            assert not CARDS[match[1]].memory_estimated
    assert copies > 5


@each_card
def test_sizes_and_clocks_are_in_range(card: GpuSpec) -> None:
    assert 4 <= card.sm_count <= 192
    assert MIB <= card.l2_bytes <= 128 * MIB
    assert 600e6 <= card.boost_clock <= 3000e6
    assert card.memory_bus_bits % 32 == 0
    assert card.limits.warp_size == 32
    assert card.architecture in {"Pascal", "Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell"}


@each_card
def test_the_memory_runs_at_the_rate_of_its_kind(card: GpuSpec) -> None:
    gigabits_per_pin = card.bandwidth * 8 / card.memory_bus_bits / 1e9
    if card.memory_bus_bits >= 2048:  # HBM2 to HBM3e
        assert 1.4 <= gigabits_per_pin <= 9.2
    elif card.integrated:  # LPDDR5 and 5X
        assert 4.2 <= gigabits_per_pin <= 9.6
    else:  # GDDR5 to GDDR7
        assert 6 <= gigabits_per_pin <= 30
    assert card.memory_clock * 2 * card.memory_bus_bits / 8 == pytest.approx(card.bandwidth)


@each_card
def test_float32_is_what_the_cores_can_do(card: GpuSpec) -> None:
    if card.name in CUT_DOWN:
        return
    per_clock = FLOAT32_PER_SM_CLOCK.get(card.compute_capability, 256)
    expected = card.sm_count * card.boost_clock * per_clock
    assert card.peak_flops["float32"] == pytest.approx(expected, rel=0.05)


@each_card
def test_half_precision_is_what_the_tensor_cores_can_do(card: GpuSpec) -> None:
    if card.name in CUT_DOWN:
        return
    per_clock = card.peak_flops["float16"] / (card.sm_count * card.boost_clock)
    rates = HALF_PER_SM_CLOCK[card.compute_capability]
    # Data sheets of V100, H100 and B200 state tensor peaks at a lower clock than the others.
    assert any(0.85 * rate <= per_clock <= 1.05 * rate for rate in rates), per_clock


@each_card
def test_dtypes_follow_the_capability_and_each_other(card: GpuSpec) -> None:
    peaks, capability = card.peak_flops, card.compute_capability
    assert {"float32", "float16"} <= set(peaks)
    assert ("bfloat16" in peaks) == ("tf32" in peaks) == (capability >= (8, 0))
    assert ("float8" in peaks) == (capability >= (8, 9))
    assert ("fp4" in peaks) == (capability >= (10, 0))
    if "bfloat16" in peaks:
        assert peaks["bfloat16"] == peaks["float16"]
        assert peaks["float16"] == pytest.approx(2 * peaks["tf32"], rel=0.02)
    if "float8" in peaks:
        assert peaks["float8"] == pytest.approx(2 * peaks["float16"], rel=0.03)


@each_card
def test_links_and_prices(card: GpuSpec) -> None:
    if card.integrated:
        assert card.link == "unified memory"
        assert card.host_link == card.bandwidth
    elif card.link.startswith("PCIe"):
        assert 15e9 <= card.host_link <= 122e9
    else:
        assert card.link == "NVLink-C2C"
        assert card.host_link in (450e9, 225e9)
    if card.price:
        day = f"{card.price.date}-01" if len(card.price.date) == 7 else card.price.date
        assert date(2016, 1, 1) <= date.fromisoformat(day) <= date(2026, 12, 31)
        low, high = (0.1, 20) if card.price.unit == "USD/h" else (100, 12_000)
        assert low <= card.price.value <= high
        assert card.price.source


# NVIDIA's own tables, in TFLOP/s, TB/s and SMs: figures that do not come from the rule above.
@pytest.mark.parametrize(
    ("name", "float32", "float16", "terabytes", "sms"),
    [
        ("GTX 1080 Ti", 11.3, 11.3, 0.484, 28),
        ("V100 SXM2 16GB", 15.7, 125, 0.900, 80),
        ("T4", 8.1, 65, 0.320, 40),
        ("RTX 2080 Ti", 13.4, 53.8, 0.616, 68),
        ("RTX 3090", 35.6, 71, 0.936, 82),
        ("RTX A6000", 38.7, 154.8, 0.768, 84),
        ("A100 SXM 80GB", 19.5, 312, 2.039, 108),
        ("A10", 31.2, 125, 0.600, 72),
        ("RTX 4070", 29.1, 58.3, 0.504, 46),
        ("RTX 4090", 82.6, 165.2, 1.008, 128),
        ("L40S", 91.6, 362, 0.864, 142),
        ("RTX 5070 Ti", 43.9, 87.9, 0.896, 70),
        ("RTX 5080", 56.3, 112.6, 0.960, 84),
        ("RTX 5090", 104.8, 209.5, 1.792, 170),
        ("RTX PRO 6000 Workstation", 125, 503.8, 1.792, 188),
        ("H100 SXM", 66.9, 989.4, 3.35, 132),
        ("H200 SXM", 66.9, 989.4, 4.8, 132),
        ("B200", 75, 2250, 8.0, 148),
    ],
)
def test_known_cards(name: str, float32: float, float16: float, terabytes: float, sms: int) -> None:
    card = CARDS[name]
    assert card.peak_flops["float32"] / 1e12 == pytest.approx(float32, rel=0.01)
    assert card.peak_flops["float16"] / 1e12 == pytest.approx(float16, rel=0.01)
    assert card.bandwidth / 1e12 == pytest.approx(terabytes, rel=0.01)
    assert card.sm_count == sms


def test_cards_are_ordered_by_generation() -> None:
    order = ["Pascal", "Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell"]
    positions = [order.index(card.architecture) for card in catalogue()]
    assert positions == sorted(positions)


def test_the_catalogue_is_read_once() -> None:
    assert catalogue() is catalogue()


# Both directions together, GB/s, as NVIDIA's data sheets and whitepapers print it.
NVLINK_BOTH_WAYS = {
    "V100 SXM2 32GB": 300,
    "RTX 2080": 50,
    "RTX 2080 Ti": 100,
    "RTX 3090": 112.5,
    "RTX A6000": 112.5,
    "A40": 112.5,
    "A30": 200,
    "A100 PCIe 80GB": 600,
    "A100 SXM 80GB": 600,
    "H100 PCIe": 600,
    "H100 SXM": 900,
    "H100 NVL": 600,
    "H20": 900,
    "H200 SXM": 900,
    "H200 NVL": 900,
    "GH200 96GB": 900,
    "B200": 1800,
    "GB300": 1800,
}


@pytest.mark.parametrize(("name", "both_ways"), NVLINK_BOTH_WAYS.items())
def test_nvlink_is_half_of_what_data_sheets_print(name: str, both_ways: float) -> None:
    nvlink = CARDS[name].nvlink
    assert nvlink is not None
    assert nvlink.bandwidth == both_ways / 2 * 1e9


@pytest.mark.parametrize("name", ["RTX 4090", "L40S", "A10", "V100 PCIe 32GB", "RTX PRO 6000 Server", "T4"])
def test_cards_without_nvlink(name: str) -> None:
    assert CARDS[name].nvlink is None
