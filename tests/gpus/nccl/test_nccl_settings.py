"""Settings as NCCL reads them: its numbers are those of C."""

import ctypes

import pytest

from vramfit.gpus.nccl.nccl_settings import NcclAlgorithm, NcclSettings, nccl_number
from vramfit.units import KIB, MIB


@pytest.mark.parametrize(
    "text",
    ["4194304", "4MB", " 12", "0x400000", "010", "09", "-2", "+7", "true", "1e6", "0x", "8,16", "2 097 152"],
)
def test_numbers_are_those_of_the_c_library(text: str) -> None:
    strtoll = ctypes.CDLL(None).strtoll
    strtoll.restype = ctypes.c_longlong
    assert nccl_number(text) == strtoll(text.encode(), None, 0)


def test_what_is_empty_is_not_set() -> None:
    assert nccl_number("") is None
    assert NcclSettings.from_environ({"NCCL_BUFFSIZE": ""}) == NcclSettings()


def test_defaults_are_those_of_the_source() -> None:
    # src/init.cc, DEFAULT_LL_BUFFSIZE and its neighbours; nccl#391: a FIFO of 4 MB in 8 slots of 512 KB
    default = NcclSettings.from_environ({})
    assert default.ll_buffer_size == 512 * KIB
    assert default.ll128_buffer_size == 4_915_200
    assert default.buffer_size == 8 * 512 * KIB
    # "NCCL proxy connections pin ~9.19 MiB of host memory each" (tonyd2wild/DeepSeek-V4.1-Flash-vLLM-DGX-Spark#8)
    assert round(default.connection_buffers / MIB, 2) == 9.19


def test_every_variable_is_read() -> None:
    read = NcclSettings.from_environ(
        {
            "NCCL_BUFFSIZE": "2097152",
            "NCCL_LL_BUFFSIZE": "1",
            "NCCL_LL128_BUFFSIZE": "2",
            "NCCL_MIN_NCHANNELS": "3",
            "NCCL_MAX_NRINGS": "4",
            "NCCL_MIN_CTAS": "5",
            "NCCL_MAX_CTAS": "6",
            "NCCL_MIN_P2P_NCHANNELS": "7",
            "NCCL_MAX_P2P_NCHANNELS": "8",
            "NCCL_NVLS_NCHANNELS": "9",
            "NCCL_NCHANNELS_PER_NET_PEER": "10",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "NCCL_CUMEM_ENABLE": "0",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_RUNTIME_CONNECT": "0",
            "NCCL_COMM_SPLIT_SHARE_RESOURCES": "1",
            "NCCL_P2P_NVL_CHUNKSIZE": "11",
            "NCCL_P2P_PCI_CHUNKSIZE": "12",
            "NCCL_P2P_NET_CHUNKSIZE": "13",
            "NCCL_NVLS_CHUNKSIZE": "14",
            "NCCL_ALGO": "ring",
        }
    )
    assert read == NcclSettings(
        buffer_size=2 * MIB,
        ll_buffer_size=1,
        ll128_buffer_size=2,
        min_channels=3,
        max_channels=4,
        min_ctas=5,
        max_ctas=6,
        min_p2p_channels=7,
        max_p2p_channels=8,
        nvls_channels=9,
        channels_per_net_peer=10,
        p2p=False,
        shm=False,
        cumem=False,
        nvls=False,
        runtime_connect=False,
        split_shares=True,
        p2p_nvl_chunk=11,
        p2p_pci_chunk=12,
        p2p_net_chunk=13,
        nvls_chunk=14,
        algorithms=frozenset({NcclAlgorithm.RING}),
    )


def test_other_spellings() -> None:
    assert not NcclSettings.from_environ({"NCCL_P2P_LEVEL": "LOC"}).p2p
    assert NcclSettings.from_environ({"NCCL_P2P_LEVEL": "SYS"}).p2p
    assert NcclSettings.from_environ({"NCCL_P2P_DISABLE": "0"}).p2p
    assert NcclSettings.from_environ({"NCCL_CUMEM_ENABLE": "-2"}).cumem is None
    assert NcclSettings.from_environ({"NCCL_MAX_NCHANNELS": "-1"}).max_channels is None
    without = NcclSettings.from_environ({"NCCL_ALGO": "^NVLS,NVLSTree"}).algorithms
    assert without == {NcclAlgorithm.RING, NcclAlgorithm.TREE, NcclAlgorithm.PAT}
    by_call = NcclSettings.from_environ({"NCCL_ALGO": "allreduce:tree"}).algorithms
    assert by_call == frozenset(NcclAlgorithm)
