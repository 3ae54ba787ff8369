"""Finding a card by what people write."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.errors import UnknownGpuError, UsageError
from vramfit.gpus import GpuKind, catalogue, find_gpu, match_gpu
from vramfit.units import GIB


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("  rtx-4090 ", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("geforce_rtx_4090", "RTX 4090"),
        ("4090 24GB", "RTX 4090"),
        ("4090 laptop", "RTX 4090 Laptop"),
        ("RTX 4090 mobile", "RTX 4090 Laptop"),
        ("RTX4090D", "RTX 4090 D"),
        ("gtx1080ti", "GTX 1080 Ti"),
        ("1080 TI", "GTX 1080 Ti"),
        ("2080ti", "RTX 2080 Ti"),
        ("4070TiSuper", "RTX 4070 Ti Super"),
        ("4070 super", "RTX 4070 Super"),
        ("4060ti 16g", "RTX 4060 Ti 16GB"),
        ("4060 Ti 16", "RTX 4060 Ti 16GB"),
        ("3080 12gb", "RTX 3080 12GB"),
        ("a100-80g", "A100 SXM 80GB"),
        ("A100 80GiB", "A100 SXM 80GB"),
        ("A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("a100_pcie_40gb", "A100 PCIe 40GB"),
        ("H100 80GB", "H100 SXM"),
        ("h100-sxm", "H100 SXM"),
        ("H100 SXM5", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("h100 pcie", "H100 PCIe"),
        ("h100nvl", "H100 NVL"),
        ("Tesla T4", "T4"),
        ("tesla v100-sxm2-32gb", "V100 SXM2 32GB"),
        ("A6000", "RTX A6000"),
        ("6000 ada", "RTX 6000 Ada"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("RTX 8000", "Quadro RTX 8000"),
        ("RTX PRO 6000", "RTX PRO 6000 Workstation"),
        ("rtx pro 6000 max-q", "RTX PRO 6000 Max-Q"),
        ("orin nano", "Jetson Orin Nano 8GB"),
        ("NVIDIA Thor", "Jetson AGX Thor"),
        ("gb10", "DGX Spark GB10"),
        ("L40S", "L40S"),
        ("l4", "L4"),
        ("A10G", "A10G"),
        ("a10", "A10"),
    ],
)
def test_names_are_forgiving(text: str, name: str) -> None:
    assert find_gpu(text).name == name


@pytest.mark.parametrize("card", catalogue(), ids=lambda card: card.name)
def test_every_name_and_alias_leads_back(card: object) -> None:
    for name in (card.name, *card.aliases):  # type: ignore[attr-defined]
        for spelling in (
            name,
            name.lower(),
            name.replace(" ", "-"),
            f"NVIDIA {name}",
            name.replace(" ", "_"),
        ):
            assert find_gpu(spelling) is card


def test_reported_names_lead_back_unless_shared() -> None:
    by_reported = {}
    for card in catalogue():
        by_reported.setdefault(card.vendor_name, []).append(card)
    for reported, cards in by_reported.items():
        if reported != "Orin":
            assert find_gpu(reported) in cards


@pytest.mark.parametrize(
    ("text", "name", "also"),
    [
        ("A100", "A100 SXM 40GB", "A100 SXM 80GB"),
        ("V100", "V100 SXM2 16GB", "V100 SXM2 32GB"),
        ("V100 32GB", "V100 SXM2 32GB", "V100 PCIe 32GB"),
        ("a100 pcie", "A100 PCIe 40GB", "A100 PCIe 80GB"),
        ("H100", "H100 SXM", "H100 NVL"),
        ("H200", "H200 SXM", "H200 NVL"),
        ("GH200", "GH200 96GB", "GH200 144GB"),
        ("4060 Ti", "RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB"),
        ("5060ti", "RTX 5060 Ti 8GB", "RTX 5060 Ti 16GB"),
        ("3080", "RTX 3080 10GB", "RTX 3080 12GB"),
        ("RTX 3050", "RTX 3050 6GB", "RTX 3050 8GB"),
        ("RTX 2060", "RTX 2060 6GB", "RTX 2060 12GB"),
        ("A2000", "RTX A2000 6GB", "RTX A2000 12GB"),
        ("AGX Orin", "Jetson AGX Orin 32GB", "Jetson AGX Orin 64GB"),
    ],
)
def test_a_family_name_is_the_smallest_card_and_says_which_others_it_fits(
    text: str, name: str, also: str
) -> None:
    match = match_gpu(text)
    assert match.spec.name == name
    others = {card.name: card for card in match.alternatives}
    assert also in others
    assert match.spec.total_bytes <= 1.001 * others[also].total_bytes


def test_a_cards_own_name_has_no_alternatives() -> None:
    for text in ("RTX 3090", "3090", "A100 SXM 40GB", "T4", "NVIDIA H100 80GB HBM3"):
        assert match_gpu(text).alternatives == ()


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("RTX 6000", ["Quadro RTX 6000", "RTX 6000 Ada", "RTX PRO 6000 Workstation"]),
        ("5000", ["Quadro RTX 5000", "RTX 5000 Ada"]),
        ("titan", ["Titan V", "Titan RTX", "Titan Xp"]),
        ("orin", ["Jetson Orin Nano 8GB", "Jetson AGX Orin 64GB"]),
    ],
)
def test_names_of_quite_different_cards_are_refused_with_the_candidates(
    text: str, candidates: list[str]
) -> None:
    with pytest.raises(UnknownGpuError) as caught:
        find_gpu(text)
    for candidate in candidates:
        assert candidate in caught.value.message
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "suggested"),
    [
        ("RTX 4091", "RTX 4090"),
        ("H1000", "H100 SXM"),
        ("A100 96GB", "A100"),
        ("GTX 4090", "RTX 4090"),
        ("RTX 5090 Tii", "RTX 5090"),
        ("geforce 3090 supr", "RTX 3090"),
        ("L40 S", "L40S"),
    ],
)
def test_an_unknown_name_suggests_the_three_nearest(text: str, suggested: str) -> None:
    with pytest.raises(UnknownGpuError) as caught:
        find_gpu(text)
    error = caught.value
    assert repr(text) in error.message
    named = [card.name for card in catalogue() if card.name in error.hint]
    assert suggested in error.hint
    assert len(named) >= 3
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("text", "suggested"),
    [
        ("RTX 4900", "RTX 4090"),
        ("4900", "RTX 4090"),
        ("4099", "RTX 4090"),
        ("RTX 4099", "RTX 4090"),
        ("RTX 0490", "RTX 4090"),
        ("RTX 409", "RTX 4090"),
        ("RTX 40900", "RTX 4090"),
        ("4900 laptop", "RTX 4090 Laptop"),
        ("3009", "RTX 3090"),
        ("RTX 5900", "RTX 5090"),
        ("4008", "RTX 4080"),
    ],
)
def test_a_mistyped_number_suggests_the_card_meant_first(text: str, suggested: str) -> None:
    with pytest.raises(UnknownGpuError) as caught:
        find_gpu(text)
    assert caught.value.hint.startswith(f"Did you mean {suggested}, ")


@pytest.mark.parametrize("text", ["-5GiB", "- 5 GiB", "-1MB"])
def test_a_negative_size_is_told(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not positive") as caught:
        find_gpu(text)
    assert "24GiB" in caught.value.hint


@pytest.mark.parametrize("text", ["", "   ", "nvidia", "gpu", "??"])
def test_a_name_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(UnknownGpuError):
        find_gpu(text)


@pytest.mark.parametrize(
    ("text", "size", "architecture"),
    [
        ("24GiB", 24 * GIB, "Ada"),
        ("24GB", 24 * 10**9, "Ada"),
        ("24564MiB", 24564 << 20, "Ada"),
        ("8g", 8 * GIB, "Ada"),
        ("48 GiB", 48 * GIB, "Ada"),
        ("80GiB", 80 * GIB, "Hopper"),
        ("141GB", 141 * 10**9, "Hopper"),
    ],
)
def test_a_size_is_a_generic_card_of_a_stated_architecture(text: str, size: int, architecture: str) -> None:
    card = find_gpu(text)
    assert card.total_bytes == size
    assert card.architecture == architecture
    assert card.architecture in card.notes
    assert card.kind is GpuKind.GENERIC
    assert card.price is None
    assert card.aliases == ()
    again = find_gpu(card.name)  # as a plan names it
    assert again.name == card.name
    assert again.total_bytes == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize("text", ["1MiB", "5TiB", "0GiB"])
def test_a_size_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="out of range"):
        find_gpu(text)


def test_a_missing_card_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the card file"):
        find_gpu(str(tmp_path / "none.toml"))


@given(st.text(max_size=40))
def test_any_text_gives_a_card_or_one_line_of_error(text: str) -> None:
    try:
        card = find_gpu(text)
    except UsageError as error:
        assert "\n" not in error.hint
    else:
        assert card.total_bytes > 0
