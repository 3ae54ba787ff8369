from __future__ import annotations

import threading

import pytest
import torch
from facade_support import virtual_cuda


@pytest.fixture
def machine():
    with virtual_cuda(count=2) as machine:
        yield machine


def test_streams_are_torchs_streams(machine):
    stream = torch.cuda.Stream()
    assert isinstance(stream, torch.cuda.Stream) and isinstance(stream, torch.Stream)
    assert issubclass(torch.cuda.Stream, torch.Stream)
    assert (stream.device, stream.stream_id, stream.device_type) == (torch.device("cuda:0"), 3, 1)
    assert repr(stream) == f"<torch.cuda.Stream device=cuda:0 cuda_stream={stream.cuda_stream:#x}>"
    assert stream != torch.cuda.Stream() and hash(stream) != hash(torch.cuda.Stream())
    assert stream.query() and stream.native_handle == stream.cuda_stream
    assert torch.cuda.Stream(priority=-1).priority == -1
    assert torch.cuda.Stream.priority_range() == (0, -3)


def test_default_and_current_stream(machine):
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.current_stream().cuda_stream == 0
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        assert machine.current_stream(0) == side.stream_id
        assert torch._C._cuda_getCurrentRawStream(0) == side.cuda_stream
    with side:
        assert torch.cuda.current_stream() == side
    with torch.cuda.stream(None):
        assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_stream_of_another_device_switches_to_it(machine):
    side = torch.cuda.Stream(device="cuda:1")
    with torch.cuda.stream(side):
        assert torch.cuda.current_device() == 1
        assert torch.cuda.current_stream() == side
    assert torch.cuda.current_device() == 0
    assert machine.current_stream(1) == 0
    with side:
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0
    torch.cuda.set_stream(side)
    assert torch.cuda.current_device() == 1


def test_streams_belong_to_the_thread(machine):
    torch.cuda.set_stream(torch.cuda.Stream())
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
    thread.start()
    thread.join()
    assert seen == [torch.cuda.default_stream()]


def test_external_streams(machine):
    stream = torch.cuda.ExternalStream(0x1234560, device=1)
    assert (stream.cuda_stream, stream.device) == (0x1234560, torch.device("cuda:1"))
    side = torch.cuda.Stream()
    assert torch.cuda.get_stream_from_external(side.cuda_stream) == side


def test_generic_streams_and_events(machine):
    stream = torch.Stream(device="cuda:1")
    assert isinstance(stream, torch.Stream) and stream.device == torch.device("cuda:1")
    assert not isinstance(stream, torch.cuda.Stream)
    assert torch.Stream().device.type == "cuda"
    assert torch.Stream(device="cpu").device.type == "cpu"
    event = torch.Event("cuda", enable_timing=True)
    event.record(stream)
    assert isinstance(event, torch.Event) and event.device == torch.device("cuda:1")
    assert torch.Event("cpu").device.type == "cpu"


def test_streams_wait_for_each_other(machine):
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    event = one.record_event()
    other.wait_event(event)
    other.wait_stream(one)
    event.wait(other)
    event.synchronize()
    one.synchronize()
    assert event.query() and event.device == torch.device("cuda:0")


def test_events_take_the_simulated_time(machine):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    assert repr(start) == "<torch.cuda.Event uninitialized>"
    start.record()
    machine.advance(2500)
    end.record()
    assert start.elapsed_time(end) == pytest.approx(2.501)
    assert repr(start).startswith("<torch.cuda.Event 0x")
    assert isinstance(start, torch.Event)


def test_two_events_are_never_at_the_same_time(machine):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    assert start.elapsed_time(end) > 0


def test_events_that_cannot_be_timed(machine):
    timed, untimed = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    with pytest.raises(ValueError, match="enable_timing=True"):
        untimed.elapsed_time(timed)
    with pytest.raises(ValueError, match="must be recorded"):
        timed.elapsed_time(torch.cuda.Event(enable_timing=True))


def test_an_event_stays_on_its_device(machine):
    event = torch.cuda.Event()
    event.record(torch.cuda.Stream(device=0))
    with pytest.raises(RuntimeError, match="does not match recording stream's device"):
        event.record(torch.cuda.Stream(device=1))
    assert len(event.ipc_handle()) == 64
    assert torch.cuda.Event.from_ipc_handle(1, event.ipc_handle()).device == torch.device("cuda:1")


def test_graphs_capture_into_a_pool_and_replays_take_time(machine):
    allocator = machine.devices[0].allocator
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        address = allocator.malloc(1 << 20, machine.current_stream(0))
        machine.advance(700)
    assert not torch.cuda.is_current_stream_capturing()
    pool = graph.pool()
    assert [s["segment_pool_id"] for s in allocator.segments()] == [pool]
    before = machine.clock_us
    graph.replay()
    assert machine.clock_us - before == pytest.approx(700)
    allocator.free(address)
    torch.cuda.empty_cache()
    assert allocator.reserved_bytes > 0
    graph.reset()
    torch.cuda.empty_cache()
    assert allocator.reserved_bytes == 0
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_a_graph_that_is_gone_gives_its_pool_back(machine):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        machine.devices[0].allocator.free(machine.devices[0].allocator.malloc(100))
    del graph
    torch.cuda.empty_cache()
    assert machine.devices[0].allocator.reserved_bytes == 0


def test_capture_wants_a_side_stream_and_an_empty_graph(machine):
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    with torch.cuda.graph(graph):
        pass
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="already owns"):
        graph.capture_begin()


def test_a_capture_ends_in_two_halves(machine):
    # As torch.cuda.CUDAGraph does from torch 2.14 on; the base class is what it calls.
    graph = torch._C._CUDAGraph(True)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        machine.advance(700)
        graph.capture_end_pre()
        assert not torch.cuda.is_current_stream_capturing() and not graph._has_graph_exec
        graph.instantiate()
        graph.capture_end_post()
    assert graph._has_graph_exec
    before = machine.clock_us
    graph.replay()
    assert machine.clock_us - before == pytest.approx(700)


def test_a_graph_holds_the_pools_that_were_used_in_its_capture(machine):
    allocator = machine.devices[0].allocator
    graph, pool = torch._C._CUDAGraph(), torch.cuda.graph_pool_handle()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, pool)
        torch._C._CUDAGraph.get_currently_capturing_graph()._retain_pool(pool)
        allocator.free(allocator.malloc(1 << 20))
        torch._C._cuda_endAllocateToPool(0, pool)
        torch._C._cuda_releasePool(0, pool)
        graph.capture_end()
    assert graph.pools() == [graph.pool(), pool]
    torch.cuda.empty_cache()
    assert allocator.reserved_bytes > 0
    graph.reset()
    torch.cuda.empty_cache()
    assert allocator.reserved_bytes == 0


def test_what_depends_on_a_condition_is_captured_on_a_stream_of_its_own(machine):
    graph = torch._C._CUDAGraph()
    with pytest.raises(RuntimeError, match="not currently capturing"):
        torch._C._CUDAGraph.get_currently_capturing_graph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        around = torch.cuda.current_stream()
        machine.advance(100)
        graph.begin_capture_to_if_node(None)
        assert torch.cuda.current_stream() != around and torch.cuda.is_current_stream_capturing()
        assert torch._C._CUDAGraph.get_currently_capturing_graph() is graph
        machine.advance(200)
        graph.end_capture_to_conditional_node()
        assert torch.cuda.current_stream() == around
        machine.advance(300)
        graph.capture_end()
    before = machine.clock_us
    graph.replay()
    assert machine.clock_us - before == pytest.approx(600)
    with pytest.raises(RuntimeError, match="conditional node"):
        graph.end_capture_to_conditional_node()


def test_classes_made_anew_share_what_functions_register(machine):
    if not hasattr(torch.cuda.graphs, "register_graph_capture_start_hook"):
        pytest.skip("torch calls hooks of all graphs from 2.14 on")
    seen = []
    handle = torch.cuda.graphs.register_graph_capture_start_hook(seen.append)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pass
    handle.remove()
    assert seen == [graph]
