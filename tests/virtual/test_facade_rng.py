from __future__ import annotations

import copy
import pickle

import pytest
import torch
from facade_support import virtual_cuda
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.virtual.torch_cuda import VirtualGenerator, default_generator, virtual_generator


@pytest.fixture
def machine():
    with virtual_cuda(count=2) as machine:
        yield machine


def test_seeding(machine):
    torch.manual_seed(7)
    assert torch.cuda.initial_seed() == 7
    torch.cuda.manual_seed(8)
    assert [generator.initial_seed() for generator in torch.cuda.default_generators] == [8, 7]
    torch.cuda.seed()
    assert torch.cuda.initial_seed() not in (7, 8)
    torch.cuda.seed_all()
    first, second = torch.cuda.default_generators
    assert first.initial_seed() == second.initial_seed()
    assert machine.devices[0].rng.seed == first.initial_seed()


def test_the_state_is_a_seed_and_an_offset(machine):
    torch.cuda.manual_seed(0x0102030405060708)
    default_generator(0).set_offset(12)
    state = torch.cuda.get_rng_state()
    assert state.dtype == torch.uint8 and state.device.type == "cpu"
    assert state.tolist() == [8, 7, 6, 5, 4, 3, 2, 1, 12, 0, 0, 0, 0, 0, 0, 0]
    torch.cuda.manual_seed(5)
    torch.cuda.set_rng_state(state)
    assert (torch.cuda.initial_seed(), torch.cuda._get_rng_state_offset()) == (0x0102030405060708, 12)
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_states_that_cannot_be_taken(machine):
    generator = torch.Generator("cuda")
    with pytest.raises(RuntimeError, match="RNG state is wrong size"):
        generator.set_state(torch.zeros(17, dtype=torch.uint8))
    with pytest.raises(TypeError, match="ByteTensor"):
        generator.set_state(torch.zeros(16))
    with pytest.raises(RuntimeError, match="multiple of 4"):
        generator.set_offset(3)
    generator.set_state(torch.tensor([9, 0, 0, 0, 0, 0, 0, 0], dtype=torch.uint8))
    assert (generator.initial_seed(), generator.get_offset()) == (9, 0)


def test_negative_seeds(machine):
    assert torch.Generator("cuda").manual_seed(-1).initial_seed() == 0xFFFF_FFFF_FFFF_FFFF


def test_generators(machine):
    generator = torch.Generator(device="cuda:1")
    assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
    assert generator.device == torch.device("cuda:1")
    assert generator.initial_seed() == 67280421310721
    assert type(torch.Generator()) is type(torch.default_generator)
    assert torch.Generator("cpu").device.type == "cpu"
    assert generator.manual_seed(3) is generator
    clone, shared = generator.clone_state(), generator.graphsafe_get_state()
    generator.manual_seed(4)
    assert (clone.initial_seed(), shared.initial_seed()) == (3, 4)
    clone.graphsafe_set_state(generator)
    generator.manual_seed(5)
    assert clone.initial_seed() == 5


@pytest.mark.parametrize("through", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_generators_can_be_copied_and_pickled(machine, through):
    generator = torch.Generator("cuda:1").manual_seed(6)
    generator.set_offset(8)
    again = through(generator)
    assert (again.device, again.initial_seed(), again.get_offset()) == (torch.device("cuda:1"), 6, 8)


def test_a_generator_is_recognised_in_the_dispatcher(machine):
    generator = torch.Generator("cuda")
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(virtual_generator((kwargs or {}).get("generator")))
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.randn(2, generator=generator)
        torch.randn(2, generator=torch.Generator())
        torch.zeros(2)
    assert seen[:2] == [generator, None] and set(seen[2:]) <= {None}


def test_draws_depend_on_the_state_alone(machine):
    generator = torch.Generator("cuda").manual_seed(1)
    assert isinstance(generator, VirtualGenerator)
    first = torch.rand(4, generator=generator.draw(4))
    second = torch.rand(4, generator=generator.draw(5))
    assert generator.get_offset() == 12
    assert not torch.equal(first, second)
    generator.set_offset(4)
    assert torch.equal(torch.rand(4, generator=generator.draw(4)), second)


def test_forked_random_states_come_back(machine):
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="fork_rng"), torch.random.fork_rng():
        torch.manual_seed(2)
        assert torch.cuda.initial_seed() == 2
    assert torch.cuda.initial_seed() == 1 == torch.initial_seed()
    with torch.random.fork_rng(devices=[1]):
        torch.cuda.manual_seed_all(3)
    assert [generator.initial_seed() for generator in torch.cuda.default_generators] == [3, 1]


def test_the_cpu_generator_is_not_touched(machine):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    torch.cuda.manual_seed(99)
    torch.Generator("cuda").manual_seed(5).draw(4)
    assert torch.equal(torch.rand(3), expected)


def test_a_kernel_of_the_program_reserves_numbers(machine):
    torch.cuda.init()
    torch.cuda.manual_seed(2**63 + 5)
    generator = torch.cuda.default_generators[0]
    seed, offset, within = generator.philox_state(5)
    assert (seed.item() & (2**64 - 1), offset.item(), within.item()) == (2**63 + 5, 0, 0)
    assert {tensor.device.type for tensor in (seed, offset, within)} == {"cpu"}
    assert generator.philox_state(1)[1].item() == 8  # numbers come four at a time
    with pytest.raises(ValueError, match="non-negative"):
        generator.philox_state(-1)


def test_the_accelerators_default_generator_is_the_cards(machine):
    torch.cuda.manual_seed(7)
    generator = torch._C._accelerator_getDefaultGenerator(0)
    assert generator.initial_seed() == 7 and generator.device == torch.device("cuda:0")
