"""Folded batch norms: what may be folded, the outputs, the undo, and the bytes on the card."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.peaks import peak_bytes
from tests.techniques.resnet import ResNet
from tests.techniques.samples import inference, output_of, profile_with
from tests.techniques.toys import numbers
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Numerics, live_of, setting_from_plain, setting_to_plain
from vramfit.techniques.batch_norm_folding import (
    BatchNormFolding,
    BatchNormFoldingSetting,
    find_foldable,
    fold_batch_norms,
)
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

TECHNIQUE = BatchNormFolding()


def trained(model: nn.Module) -> nn.Module:
    """Batch norms with statistics and parameters as after some training."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            if module.affine:
                nn.init.normal_(module.weight, 1.0, 0.2)
                nn.init.normal_(module.bias)
    return model.eval()


class Net(nn.Module):
    """One pair of each kind that can be folded, activations of which some can run in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.act, self.wide = nn.SiLU(), nn.ReLU()
        self.up, self.up_norm = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.BatchNorm2d(6, affine=False)
        self.head, self.head_norm = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(self.stem(x)))
        y = self.up_norm(self.up(x))
        z = self.wide(y) - y  # y is read again
        return self.head_norm(self.head(z.mean((2, 3))))


class Reused(nn.Module):
    """Pairs that must not be folded, each for its own reason."""

    def __init__(self) -> None:
        super().__init__()
        names = ("read", "kept", "shared", "twice", "hooked", "grouped", "tied", "weighted")
        self.kept_value = torch.zeros(1)
        for name in names:
            self.add_module(name, nn.Conv2d(4, 4, 1))
            self.add_module(f"{name}_norm", nn.BatchNorm2d(4))
        self.tied_too = nn.Conv2d(4, 4, 1)
        self.tied_too.weight = self.tied.weight
        self.shared_norm_too = nn.BatchNorm2d(4)
        self.grouped = nn.ConvTranspose2d(4, 4, 1, groups=2)
        self.free_norm = nn.BatchNorm2d(4, track_running_stats=False)
        self.free = nn.Conv2d(4, 4, 1)
        self.tokens, self.tokens_norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        nn.utils.parametrizations.weight_norm(self.weighted)
        self.hooked.register_forward_hook(lambda _module, _args, output: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.read(x)
        x = self.read_norm(read) + read
        kept = self.kept(x)
        self.kept_value = kept
        x = self.kept_norm(kept)
        shared = self.shared(x)
        x = self.shared_norm(shared) + self.shared_norm_too(shared)
        x = self.twice_norm(self.twice(x)) + self.twice(x)
        x = self.hooked_norm(self.hooked(x))
        x = self.grouped_norm(self.grouped(x))
        x = self.tied_norm(self.tied(x)) + self.tied_too(x)
        x = self.weighted_norm(self.weighted(x))
        x = self.free_norm(self.free(x))
        return self.tokens_norm(self.tokens(x.mean(3)))


def images(batch_size: int) -> torch.Tensor:
    return numbers(batch_size, 3, 16, 16)


def folded(workload: Workload, model: nn.Module, batch: torch.Tensor) -> Workload:
    return TECHNIQUE.apply(workload, find_foldable(model, batch))


def test_every_pair_is_found_and_outputs_are_the_same_up_to_rounding() -> None:
    model, x = trained(Net()), images(3)
    found = find_foldable(model, x)
    assert found.norms == {"norm": "stem", "up_norm": "up", "head_norm": "head"}
    assert found.activations == ("act",)
    with torch.no_grad():
        plain = model(x)
        live = fold_batch_norms(model, x)
        assert model.act.inplace and not model.wide.inplace
        assert 0 < (model(x) - plain).norm() <= 1e-6 * plain.norm()
        live.undo()
        assert torch.equal(model(x), plain) and not model.act.inplace


def test_weights_are_those_of_torch() -> None:
    model = trained(Net()).double()
    conv = fuse_conv_bn_eval(model.stem, model.norm)
    transposed = copy.deepcopy(model)
    transposed.up_norm.weight, transposed.up_norm.bias = None, None
    up = fuse_conv_bn_eval(transposed.up, transposed.up_norm, transpose=True)
    linear = fuse_linear_bn_eval(model.head, model.head_norm)
    fold_batch_norms(model, images(2).double())
    for mine, theirs in ((model.stem, conv), (model.up, up), (model.head, linear)):
        assert torch.allclose(mine.weight, theirs.weight, rtol=1e-14)
        assert torch.allclose(mine.bias, theirs.bias, rtol=1e-14)


def test_what_others_see_is_not_folded() -> None:
    model = trained(Reused())
    x = numbers(2, 4, 4, 5)
    with torch.no_grad():
        model(x)
    assert find_foldable(model, x) == BatchNormFoldingSetting()
    with pytest.raises(UsageError, match="names no batch norms"):
        fold_batch_norms(model, x)


def test_training_mode_is_not_folded() -> None:
    model = Net().train()
    assert not find_foldable(model, images(3)).norms
    model.eval()
    assert find_foldable(copy.deepcopy(model).to("meta"), images(3).to("meta")) == find_foldable(
        model, images(3)
    )


def test_a_resnet_keeps_its_outputs_and_gets_its_weights_back_bit_for_bit() -> None:
    model, x = trained(ResNet((1, 1, 1, 1), 8, 10)), numbers(2, 3, 32, 32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        plain = model(x)
        live = fold_batch_norms(model, x)
        for other in (model, copy.deepcopy(model), _pickled(model)):
            assert (other(x) - plain).norm() <= 1e-6 * plain.norm()
        live.undo()
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def _pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


def test_a_norm_that_gets_another_tensor_is_an_error() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x) if x.shape[0] > 1 else x)

    model = trained(Branching())
    fold_batch_norms(model, images(2))
    with torch.no_grad():
        model(images(3))
        with pytest.raises(UsageError, match="norm was folded into the layer before it"):
            model(images(1))


@pytest.mark.parametrize(
    ("norms", "activations", "message"),
    [
        ({"norm": "head"}, (), "norm cannot be folded into head, a Linear"),
        ({"norm": "stem", "up_norm": "stem"}, (), "two norms into one layer"),
        ({"act": "stem"}, (), "act is no batch norm"),
        ({"nrm": "stem"}, (), "no module 'nrm'"),
        ({}, ("head",), "head, a Linear, cannot run in place"),
    ],
)
def test_bad_settings_are_one_line_and_change_nothing(
    norms: dict[str, str], activations: tuple[str, ...], message: str
) -> None:
    model = trained(Net())
    before = model.stem.weight.clone()
    with pytest.raises(UsageError, match=message):
        TECHNIQUE.attach(
            AttachedProgram(model, None), BatchNormFoldingSetting(norms=norms, activations=activations)
        )
    assert torch.equal(model.stem.weight, before) and model.stem.bias is None


def test_settings_are_plain_and_promises_say_what_they_do() -> None:
    setting = BatchNormFoldingSetting(norms={"norm": "stem"}, activations=("act",))
    assert setting_from_plain(TECHNIQUE, setting_to_plain(setting)) == setting
    assert TECHNIQUE.promise(setting).numerics is Numerics.ROUNDING
    assert TECHNIQUE.promise(BatchNormFoldingSetting(activations=("act",))).numerics is Numerics.BITWISE
    assert TECHNIQUE.describe(setting) == "1 norms, 1 in place"


def test_options_are_for_inference_alone() -> None:
    model = trained(Net())
    assert list(TECHNIQUE.options(profile_with(model, images(2)))) == [find_foldable(model, images(2))]
    assert not list(TECHNIQUE.options(profile_with(model, images(2), trains=True)))
    assert not list(TECHNIQUE.options(profile_with(model, images(2), samples=None)))
    assert not list(TECHNIQUE.options(profile_with(nn.Linear(2, 2), numbers(1, 2))))


def test_a_workload_keeps_its_outputs_and_its_weights_are_counted_on_the_host() -> None:
    plain = inference(lambda: trained(Net()), images)
    planned = folded(plain, plain.make_model(), images(2))
    before, after = output_of(plain), output_of(planned)
    assert (before - after).norm() <= 1e-6 * before.norm()
    live = live_of(planned.start("cpu"))
    assert live is not None
    model = plain.make_model()
    changed = (model.stem.weight, model.up.weight, model.up.bias, model.head.weight, model.head.bias)
    assert live.pageable_bytes == sum(one.nbytes for one in changed)


def test_the_norms_result_is_saved_on_the_card(gpu: VirtualGPU) -> None:
    """The widest place holds a convolution's result and the norm's: one of them is left, with its half of the next."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.act = nn.Conv2d(3, 64, 1), nn.BatchNorm2d(64), nn.ReLU()
            self.pool = nn.MaxPool2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pool(self.act(self.norm(self.conv(x))))

    def batch(count: int) -> torch.Tensor:
        return numbers(count, 3, 64, 64)

    plain = inference(Stem, batch)
    planned = folded(plain, Stem().eval().to("meta"), batch(4).to("meta"))
    wide = 4 * 64 * 64 * 64 * 4
    pooled = wide // 16 * 3  # values, and positions in 64 bits
    assert peak_bytes(plain) - peak_bytes(planned) == pytest.approx(wide - pooled, abs=8192)


def test_functional_activations_are_left_alone() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.norm(self.conv(x)))

    found = find_foldable(trained(Functional()), images(2))
    assert found == BatchNormFoldingSetting(norms={"norm": "conv"})
