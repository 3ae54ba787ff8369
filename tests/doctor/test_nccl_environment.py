"""NCCL's settings as the doctor explains them."""

from dataclasses import replace

import pytest
from tests.doctor.machines import CARD, DRIVER, QUIET_BOX

from vramfit.doctor import Facts, Finding, Severity, diagnose
from vramfit.doctor.checks.nccl_environment import _MEANINGS, nccl_environ
from vramfit.doctor.facts import RELEVANT, NcclFileSetting


def found(facts: Facts, check: str) -> list[Finding]:
    return [finding for finding in diagnose(facts).findings if finding.check == check]


def one(facts: Facts, check: str) -> Finding:
    [finding] = found(facts, check)
    return finding


def with_environ(**environ: str) -> Facts:
    return replace(QUIET_BOX, environ=environ)


def cards(name: str, count: int) -> Facts:
    of = tuple(replace(CARD, index=index, name=name, uuid=f"GPU-{index}") for index in range(count))
    return replace(QUIET_BOX, driver=replace(DRIVER, cards=of))


def test_every_variable_of_nccl_that_is_gathered_is_explained() -> None:
    gathered = {name for name in RELEVANT if name.startswith("NCCL_")}
    assert gathered == _MEANINGS.keys()
    for name in gathered:
        for value in ("0", "1"):
            finding = one(with_environ(**{name: value}), "nccl-setting")
            assert finding.finding == f"{name}={value}"
            assert finding.severity is Severity.INFO
            assert finding.why


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "NCCL_BUFFSIZE",
            "1048576",
            "8.00 MiB for each channel and neighbour, where the default is 10.00 MiB",
        ),
        ("NCCL_MAX_NCHANNELS", "4", "at most 4 channels: memory grows linearly"),
        ("NCCL_MIN_P2P_NCHANNELS", "8", "at least 8 channels of send and receive"),
        ("NCCL_PROTO", "LL", "nothing: every connection has the buffers of all three protocols"),
        ("NCCL_CUMEM_ENABLE", "0", "connects its rings and trees at once"),
        ("NCCL_CUMEM_ENABLE", "1", "each small array of a channel takes 2 MiB"),
        ("NCCL_P2P_DISABLE", "1", "/dev/shm takes it instead"),
        ("NCCL_DEBUG", "INFO", "nothing on the card"),
        ("NCCL_SOCKET_NTHREADS", "4", "nothing on the card"),
        ("NCCL_NVLS_ENABLE", "0", "256 MiB less on each of eight H100"),
        ("NCCL_P2P_NVL_CHUNKSIZE", "262144", "slots of 256.00 KiB"),
    ],
)
def test_what_a_setting_does_to_memory(name: str, value: str, said: str) -> None:
    assert said in one(with_environ(**{name: value}), "nccl-setting").why


@pytest.mark.parametrize(
    ("text", "number"), [("4MB", 4), ("4M", 4), ("2 MiB", 2), ("true", 0), ("010", 8), ("1e6", 1)]
)
def test_numbers_that_nccl_reads_otherwise_than_they_look(text: str, number: int) -> None:
    finding = one(with_environ(NCCL_BUFFSIZE=text), "nccl-number")
    assert finding.severity is Severity.WARNING
    assert finding.finding == f"NCCL_BUFFSIZE={text!r} means {number} to NCCL"


@pytest.mark.parametrize("text", ["4194304", "0x400000", "-2", "0", ""])
def test_plain_numbers_are_no_trouble(text: str) -> None:
    assert (
        found(with_environ(NCCL_BUFFSIZE=text, NCCL_DEBUG="INFO", NCCL_PROTO="^LL128"), "nccl-number") == []
    )


def test_files_set_what_the_environment_does_not() -> None:
    facts = replace(
        QUIET_BOX,
        environ={"NCCL_BUFFSIZE": "1048576"},
        nccl_files=(
            NcclFileSetting(name="NCCL_BUFFSIZE", value="2", path="/etc/nccl.conf"),
            NcclFileSetting(name="NCCL_CUMEM_ENABLE", value="0", path="/etc/nccl.conf"),
        ),
    )
    assert nccl_environ(facts) == {"NCCL_BUFFSIZE": "1048576", "NCCL_CUMEM_ENABLE": "0"}
    assert one(facts, "nccl-files").finding == "/etc/nccl.conf sets NCCL_CUMEM_ENABLE=0"
    assert [finding.finding for finding in found(facts, "nccl-setting")] == [
        "NCCL_BUFFSIZE=1048576",
        "NCCL_CUMEM_ENABLE=0",
    ]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "out to the network adapter and back"),
        ({"NCCL_MIN_NCHANNELS": "8", "NCCL_MAX_CTAS": "2"}, "memory is that of 8 channels"),
        ({"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"}, "64 sockets at most"),
    ],
)
def test_settings_that_fight(environ: dict[str, str], said: str) -> None:
    finding = one(with_environ(**environ), "nccl-sense")
    assert finding.severity is Severity.WARNING
    assert said in finding.why


def test_settings_that_agree() -> None:
    fine = {"NCCL_MIN_NCHANNELS": "2", "NCCL_MAX_NCHANNELS": "8", "NCCL_SOCKET_NTHREADS": "8"}
    assert found(with_environ(**fine, NCCL_P2P_DISABLE="1"), "nccl-sense") == []


def test_variables_of_torch() -> None:
    assert (
        "nothing since torch 2.8"
        in one(with_environ(TORCH_NCCL_AVOID_RECORD_STREAMS="1"), "record-streams").why
    )
    hook = {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK": "1"}
    assert "ignores it" not in one(with_environ(**hook), "register-hook").why
    both = with_environ(**hook, PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert "with expandable segments torch ignores it" in one(both, "register-hook").why
    assert found(with_environ(TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK="0"), "register-hook") == []
    assert "host memory" in one(with_environ(TORCH_NCCL_TRACE_BUFFER_SIZE="2000"), "flight-recorder").why
    assert found(with_environ(TORCH_NCCL_TRACE_BUFFER_SIZE="0"), "flight-recorder") == []
    assert (
        "with 1 they start in the program's order"
        in one(with_environ(CUDA_DEVICE_MAX_CONNECTIONS="1"), "connections").why
    )


def test_what_nccl_would_take_of_the_cards_here() -> None:
    eight = one(cards("NVIDIA H100 80GB HBM3", 8), "nccl-memory")
    assert eight.severity is Severity.OK
    assert eight.finding == (
        "a communicator over 8 x H100 SXM takes 486.00 MiB to 1.07 GiB of each card for all-reduce, 2.85 GiB to "
        "3.69 GiB for all-to-all, and the first one 193.00 MiB to 702.44 MiB more: outside of torch's allocator, "
        "estimated from NCCL's source"
    )
    bounded = replace(cards("NVIDIA H100 80GB HBM3", 8), environ={"NCCL_MAX_CTAS": "1"})
    assert "for all-reduce" in one(bounded, "nccl-memory").finding
    assert one(bounded, "nccl-memory").finding != eight.finding


def test_one_card_and_unknown_cards_have_no_estimate() -> None:
    assert found(QUIET_BOX, "nccl-memory") == []
    assert found(cards("A card of tomorrow", 2), "nccl-memory") == []
